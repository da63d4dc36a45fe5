"""Which of dockerd's answers have no end of their own: who stops does not wait for them.

Events, and logs and figures that are followed, go on until their client, dockerd or the container
ends. Clients of these streams open them again, as after a restart of dockerd. An attached terminal
and a `wait` are waited for: what they missed cannot be asked for again.
"""

import re
from urllib.parse import parse_qs, urlsplit

from runtime_proxy.docker.http1 import RequestHead

_PATH = re.compile(r"(?:/v[0-9.]+)?/(?:(events)|containers/[^/]+/(logs|stats))")
# As dockerd reads a flag of a query.
_FALSE = frozenset(("", "0", "no", "false", "none"))


def endless(head: RequestHead) -> bool:
    try:
        target = urlsplit(head.target.decode("ascii"))
    except ValueError:
        return False
    match = _PATH.fullmatch(target.path)
    if head.method != b"GET" or match is None:
        return False
    query = parse_qs(target.query, keep_blank_values=True)

    def flag(name: str, default: str) -> bool:
        return query.get(name, [default])[0].strip().lower() not in _FALSE

    events, of_container = match.groups()
    if events:
        return not query.get("until", [""])[0]
    return flag("follow", "") if of_container == "logs" else flag("stream", "1")
