"""Text files from any system: their content in UTF-8."""

import codecs


def as_utf8(data: bytes) -> bytes:
    """Return a text in UTF-8, without a mark of its encoding in front.

    Args:
        data: content of a file; UTF-16, which Windows may write, is known by its mark.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace").encode("utf-8", "replace")
    return data.removeprefix(codecs.BOM_UTF8)
