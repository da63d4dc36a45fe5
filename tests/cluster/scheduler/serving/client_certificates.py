"""Certificates that clients present."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def client_certificate(folder: Path, ca_name: str, user: str) -> tuple[Path, Path, Path]:
    """Return the files of a CA, and of a client certificate and its key."""
    now = datetime.now(UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def certificate(subject: str, public: Any, *, ca: bool) -> bytes:
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ca_name)])
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(ca_key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )

    files = tuple(folder / f"{ca_name}.{part}" for part in ("ca", "crt", "key"))
    files[0].write_bytes(certificate(ca_name, ca_key.public_key(), ca=True))
    files[1].write_bytes(certificate(user, key.public_key(), ca=False))
    files[2].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files[0], files[1], files[2]
