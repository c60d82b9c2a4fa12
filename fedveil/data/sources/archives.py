"""Members of zip archives, read into memory."""

from __future__ import annotations

import zipfile


def read_member(archive: zipfile.ZipFile, name: str | zipfile.ZipInfo) -> bytes:
    """Read a member of at most its declared size; refuse one that unpacks to another size.

    `ZipFile.read` unpacks a member completely before it truncates it to the declared size.
    """
    info = archive.getinfo(name) if isinstance(name, str) else name
    with archive.open(info) as member:
        content = member.read(info.file_size)
        member.read(1)  # reaches the end, where the checksum is verified
    if len(content) != info.file_size:
        raise zipfile.BadZipFile(f"it holds {len(content)} bytes, not {info.file_size}")
    return content
