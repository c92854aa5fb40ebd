"""Text to token ids and back."""

from __future__ import annotations

from pathlib import Path


class Tokenizer:
    """A checkpoint's tokenizer.json; without one, bytes are ids."""

    def __init__(self, path: Path | None) -> None:
        self._tokenizer = None
        if path is not None:
            from tokenizers import Tokenizer as Fast

            self._tokenizer = Fast.from_file(str(path))

    @classmethod
    def of(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a checkpoint's folder."""
        path = folder / "tokenizer.json"
        return cls(path if path.is_file() else None)

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self._tokenizer.decode(tokens))


def read_document(path: Path) -> str:
    """The text of a file. Raises ValueError for a file that has none."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the document {path}: {error}; give a text file") from None
    if not text.strip():
        raise ValueError(f"the document {path} is empty; give a text file")
    return text
