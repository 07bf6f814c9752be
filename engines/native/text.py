"""Text of a stream: a pure function of its token ids, whoever computes it.

`StreamText` takes ids one after another and releases text as soon as it can never change: bytes
of an unfinished UTF-8 character and the beginning of a possible stop string are held back. A
resumed engine feeds the same ids and gets the same releases, so "everything behind N characters"
means the same on both sides of a takeover.

Invariants
    1. Feeding ids in one call or in many gives the same releases.
    2. Released text is never taken back; a stop string and what follows it is never released.
    3. Special tokens have no text.

Byte-level vocabularies (Llama 3, Qwen) go through a table of bytes, so that rebuilding a long
stream takes microseconds: a takeover rebuilds all of them at once. Any other tokenizer goes
through the library's own incremental decoder.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

__all__ = ["ByteLevelDecoding", "Decoding", "StreamDecoding", "StreamText", "decoding_for"]


class _Incremental(Protocol):
    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these ids."""

    def finish(self) -> str:
        """What is still held back, unfinished characters as U+FFFD."""


class Decoding(Protocol):
    """How one tokenizer turns ids into text; shared by all streams, immutable."""

    def start(self) -> _Incremental:
        """A decoder for one stream."""


def _bytes_of_characters() -> dict[str, int]:
    """The printable stand-in for each byte that byte-level BPE uses (GPT-2's published table)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in kept}
    others = (byte for byte in range(256) if byte not in kept)
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table


_BYTE_OF: Final = _bytes_of_characters()


class ByteLevelDecoding:
    """Byte-level vocabulary: each id is a fixed run of bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values()) + 1
        self._bytes: list[bytes] = [b""] * size
        for token, token_id in vocabulary.items():
            if token_id not in special:
                self._bytes[token_id] = self._spelled(token)

    @staticmethod
    def _spelled(token: str) -> bytes:
        values = [_BYTE_OF.get(character) for character in token]
        if None in values:  # an added token is spelled as it reads
            return token.encode()
        return bytes(value for value in values if value is not None)

    def start(self) -> "_ByteLevelStream":
        """A decoder for one stream."""
        return _ByteLevelStream(self._bytes)


class _ByteLevelStream:
    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        size = len(table)  # embeddings may be padded beyond the vocabulary: such ids have no text
        return self._decoder.decode(b"".join([table[i] for i in token_ids if i < size]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class StreamDecoding:
    """Any other tokenizer, through the library's incremental decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def start(self) -> "_LibraryStream":
        """A decoder for one stream."""
        return _LibraryStream(self._tokenizer)


class _LibraryStream:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._unfinished: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces: list[str] = []
        for token_id in token_ids:
            piece = self._stream.step(self._tokenizer, token_id)
            if piece is None:
                self._unfinished.append(token_id)
            else:
                self._unfinished.clear()
                pieces.append(piece)
        return "".join(pieces)

    def finish(self) -> str:
        return self._tokenizer.decode(self._unfinished, skip_special_tokens=True)


def decoding_for(tokenizer: Tokenizer) -> Decoding:
    """The fastest decoding that is right for this tokenizer."""
    decoder: Any = json.loads(tokenizer.to_str()).get("decoder") or {}
    if decoder.get("type") == "ByteLevel":
        return ByteLevelDecoding(tokenizer)
    return StreamDecoding(tokenizer)


class StreamText:
    """The text of one stream. Feed ids, then `take` what may be sent."""

    def __init__(self, decoding: Decoding, stop: Sequence[str], *, skip_chars: int = 0) -> None:
        self._decoder = decoding.start()
        self._stop = tuple(s for s in stop if s)
        self._held = ""  # may be the beginning of a stop string
        self._released: list[str] = []
        self._skip_chars = skip_chars  # of the text released from here on, the client has these
        self.is_stopped = False  # a stop string is complete: nothing is released any more
        self.chars = 0  # code points released so far

    def feed(self, token_ids: Iterable[int]) -> None:
        """Append output tokens."""
        ids = list(token_ids)
        if not self._stop:
            self._release(self._decoder.feed(ids))
            return
        for token_id in ids:  # one by one: which stop string comes first depends on the tokens
            if self.is_stopped:
                return
            self._held += self._decoder.feed((token_id,))
            self._search()

    def finish(self) -> None:
        """No token will follow: release what was held back."""
        if self.is_stopped:
            return
        rest = self._decoder.finish()
        if not self._stop:
            self._release(rest)
            return
        self._held += rest
        self._search()
        if not self.is_stopped:
            self._release(self._held)
            self._held = ""

    def take(self) -> str:
        """Text released since the last call, without what the client already has."""
        if not self._released:
            return ""
        text = "".join(self._released)
        self._released.clear()
        if self._skip_chars:
            skipped = min(self._skip_chars, len(text))
            self._skip_chars -= skipped
            text = text[skipped:]
        return text

    def _search(self) -> None:
        found = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.is_stopped = True
            self._release(self._held[: min(found)])
            self._held = ""
            return
        keep = max(_overlap(self._held, s) for s in self._stop)
        cut = len(self._held) - keep
        self._release(self._held[:cut])
        self._held = self._held[cut:]

    def _release(self, text: str) -> None:
        if text:
            self._released.append(text)
            self.chars += len(text)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, the whole left out."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
