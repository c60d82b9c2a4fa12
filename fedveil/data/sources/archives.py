"""Members of zip archives, read into memory."""

from __future__ import annotations

import zipfile


def read_member(archive: zipfile.ZipFile, name: str | zipfile.ZipInfo) -> bytes:
    """What a member holds, as long as it says to be; one that unpacks to something else is refused.

    `ZipFile.read` unpacks all of a member before it cuts it to the length that it declares.
    """
    info = archive.getinfo(name) if isinstance(name, str) else name
    with archive.open(info) as member:
        content = member.read(info.file_size)
        member.read(1)  # the end, where the checksum is compared
    if len(content) != info.file_size:
        raise zipfile.BadZipFile(f"it holds {len(content)} bytes, not {info.file_size}")
    return content
