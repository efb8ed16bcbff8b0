"""Opens the fsspec file system of a URL.

Credentials and endpoints are the library's own, from the environment of the process (such as AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN).
"""

from __future__ import annotations

import importlib
from typing import Any

from modelpool.pool.files.fetch.fetch_errors import LibraryMissing, SourceFailed
from modelpool.pool.files.fetch.source_url import EXTRAS, scheme_of
from modelpool.pool.values.core.install_hint import install_command


def open_file_system(url: str, **options: Any) -> Any:
    """Return the fsspec file system of `url`, with options of its library. Raises LibraryMissing naming the extra to
    install, and SourceFailed.
    """
    scheme = scheme_of(url)
    extra = EXTRAS.get(scheme)
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        raise LibraryMissing(f"{url}: needs fsspec; install it with `{install_command(extra or 's3')}`") from None
    if scheme not in fsspec.available_protocols():
        raise LibraryMissing(
            f"{url}: no library reads {scheme}://; expected one of http://, https://, file://, "
            f"{', '.join(f'{name}://' for name in EXTRAS)}, or a scheme of an installed fsspec library"
        )
    try:
        system, _ = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        install = f"`{install_command(extra)}`" if extra else "the fsspec library of that scheme"
        raise LibraryMissing(
            f"{url}: the library of {scheme}:// is not installed; install {install} ({error})"
        ) from None
    except Exception as error:
        raise SourceFailed(f"{url}: cannot be opened: {type(error).__name__}: {error}") from error
    return system
