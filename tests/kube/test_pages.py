"""The pages of a list: their sizes, and answers that are longer than a client takes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from aiohttp import web

from kube import http_connection
from kube.client import AnswerTooLong, Client
from kube.kept_client import KeptClient
from kube.pages import pages
from tests.kube.scripted import api, listing, node


def _read(
    objects: int, text: str, *, kind: type[Client] = Client
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return of each page its objects and its version, and the sizes that were asked for.

    objects: of the whole list. text: in a label of each.
    """
    asked: list[int] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        begin = int(request.query.get("continue", "0"))
        asked.append(int(request.query["limit"]))
        end = min(objects, begin + asked[-1])
        items = (node(f"n{number}", 1, text=text) for number in range(begin, end))
        return listing(7, *items, more=str(end) if end < objects else "")

    async def run() -> list[tuple[int, int]]:
        read = []
        async with (
            api(handler, kind=kind) as client,
            aclosing(pages(client, "/api/v1/nodes", {})) as listed,
        ):
            async for page in listed:
                read.append((len(page.items), int(page.version)))
        return read

    return asyncio.run(run()), asked


def test_pages_of_small_objects_have_more_of_them() -> None:
    read, asked = _read(9000, "x")
    assert asked == [500, 2000, 5000, 5000]
    assert read == [(500, 7), (2000, 7), (5000, 7), (1500, 7)]


def test_pages_of_large_objects_have_fewer_of_them() -> None:
    read, asked = _read(700, "x" * 20_000)
    # 8 MiB of about 20,100 bytes each.
    assert asked[0] == 500 and 400 < asked[1] < 420
    assert [count for count, _ in read] == [500, 200]


def test_an_answer_that_is_too_long_is_asked_for_in_smaller_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connection, "_LONGEST_ANSWER", 300_000)
    read, asked = _read(600, "x" * 1000, kind=KeptClient)
    # Of the page of 250, 8 MiB would be the next; that is too long here.
    assert asked[:2] == [500, 250] and read[0] == (250, 7)
    assert sum(count for count, _ in read) == 600


def test_one_object_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "_LONGEST_ANSWER", 100_000)
    with pytest.raises(AnswerTooLong):
        _read(2, "x" * 3_000_000, kind=KeptClient)
