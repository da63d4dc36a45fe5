"""`GET /events`: the audit log over HTTP, page by page, newest first, as upstream answers it.

Facts: docs/facts/koordlet.md, "Audit log". Asked for exactly `application/json`, or for a list of
types that has it, the answer is JSON; otherwise it is text, with the token in a header.
"""

from __future__ import annotations

from typing import Final

import msgspec

from koordlet.audit.pages import Expired, Pages
from service.http_server import Request, Response, text

_DEFAULT_SIZE: Final = 256
"""Upstream's."""
_JSON: Final = "application/json"


def answer(pages: Pages, request: Request, *, most: int) -> Response:
    """Return one page. Reads the disk, so call it in a worker thread.

    most: entries of a page. 400 for a size that is not positive or above it, 409 for a token that
    is unknown or has expired, 500 when the log cannot be read.
    """
    try:
        size = int(request.query.get("size", ""))
    except ValueError:
        size = _DEFAULT_SIZE
    if not 1 <= size <= most:
        return text(400, f"size: {size} is not between 1 and {most}")
    try:
        page = pages.page(size, request.query.get("pageToken", ""))
    except Expired:
        return text(409, "pageToken: unknown or expired; begin again without it")
    except OSError as error:
        return text(500, f"the audit log cannot be read: {error.strerror or error}")
    if _JSON in (each.split(";")[0].strip() for each in request.accept.split(",")):
        body = msgspec.json.encode({"NextPageToken": page.token, "Events": page.entries})
        return Response(200, body, f"{_JSON}; charset=utf-8")
    lines = b"".join(msgspec.json.encode(entry) + b"\n" for entry in page.entries)
    headers = (("Next-Page-Token", page.token),) if page.token else ()
    return Response(200, lines, headers=headers)
