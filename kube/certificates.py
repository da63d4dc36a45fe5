"""Certificates of a webhook server: makes, checks and rotates a private CA and a leaf.

Plain functions over PEM bytes; the caller stores them. The CA's key leaves this process only into
the Secret that replicas share. ECDSA P-256.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS: Final = 3650
"""Chosen: clients trust this CA only for this webhook, so a long life costs little."""
LEAF_DAYS: Final = 365
"""Chosen; every rotation changes a Secret and the certificate of each replica."""
RENEW_BEFORE: Final = timedelta(days=120)
"""A leaf is renewed with a third of its life left, so that missed rounds do not matter."""
CA_RENEW_BEFORE: Final = timedelta(days=LEAF_DAYS + 30)
"""A CA must outlive every leaf that it signs; the month covers clocks and rounds."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts: the CA (followed by the previous CA while that is trusted) and one leaf."""

    ca_cert: bytes
    ca_key: bytes
    cert: bytes
    key: bytes


def problem_with(
    certificates: Certificates, dns_names: Sequence[str], *, now: datetime | None = None
) -> str | None:
    """Return why a server for `dns_names` needs new certificates, or None."""
    moment = now or datetime.now(UTC)
    try:
        leaf = x509.load_pem_x509_certificate(certificates.cert)
        authority = x509.load_pem_x509_certificate(certificates.ca_cert)
        key = serialization.load_pem_private_key(certificates.key, password=None)
        leaf.verify_directly_issued_by(authority)
    except Exception as error:  # noqa: BLE001 - cryptography raises many kinds for bad input
        return f"cannot be read: {error}"
    if _public(leaf.public_key()) != _public(key.public_key()):
        return "certificate and key do not belong together"
    if leaf.not_valid_before_utc > moment:
        return "the certificate is not valid yet"
    if leaf.not_valid_after_utc - RENEW_BEFORE <= moment:
        return f"the certificate ends at {leaf.not_valid_after_utc:%Y-%m-%d}"
    if authority.not_valid_after_utc <= leaf.not_valid_after_utc:
        return "the CA ends before the certificate"
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = set(names.get_values_for_type(x509.DNSName))
    known |= {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    missing = [name for name in dns_names if name not in known]
    return f"the certificate does not name {', '.join(missing)}" if missing else None


def ends_at(certificates: Certificates) -> datetime:
    """Return when the leaf ends. Raises ValueError if it cannot be read."""
    return x509.load_pem_x509_certificate(certificates.cert).not_valid_after_utc


def make_certificates(
    dns_names: Sequence[str],
    *,
    previous: Certificates | None = None,
    now: datetime | None = None,
) -> Certificates:
    """Return a new leaf for `dns_names`, signed by `previous`'s CA while that lives long enough.

    Keeping the CA keeps clients that still hold the old bundle working during a rotation.
    """
    moment = now or datetime.now(UTC)
    authority = _usable_authority(previous, moment)
    trusted = previous.ca_cert if previous is not None else b""
    if authority is None:
        authority = _make_authority(moment)
        new = authority[0].public_bytes(serialization.Encoding.PEM)
        # Clients trust leaves of the previous CA until the next rotation.
        trusted = new + _first_certificate(trusted)
    ca_cert, ca_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    # 64 characters bound a common name; clients look at the alternative names only.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_names[0][:64])])
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(ca_cert.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - timedelta(minutes=5))
        .not_valid_after(moment + timedelta(days=LEAF_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in dns_names]),
            critical=False,
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    return Certificates(
        ca_cert=trusted,
        ca_key=_private(ca_key),
        cert=cert.public_bytes(serialization.Encoding.PEM),
        key=_private(key),
    )


def _first_certificate(pem: bytes) -> bytes:
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError:
        return b""
    return found[0].public_bytes(serialization.Encoding.PEM)


def _usable_authority(
    previous: Certificates | None, moment: datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None:
    if previous is None:
        return None
    try:
        cert = x509.load_pem_x509_certificate(previous.ca_cert)
        key = serialization.load_pem_private_key(previous.ca_key, password=None)
    except (ValueError, TypeError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return None
    if _public(cert.public_key()) != _public(key.public_key()):
        return None
    return (cert, key) if cert.not_valid_after_utc - CA_RENEW_BEFORE > moment else None


def _make_authority(moment: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "webhook-cert-ca")])
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - timedelta(minutes=5))
        .not_valid_after(moment + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return cert, key


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _public(key: object) -> bytes:
    return key.public_bytes(  # type: ignore[attr-defined, no-any-return]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
