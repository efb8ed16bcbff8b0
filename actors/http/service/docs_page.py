"""The page at `/docs`: the calls of this server, from its OpenAPI description. Without scripts, so that it needs no
files of other sites and no permission for any. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

#: no scripts, no files; its own styles are in the page
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
DOCS_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_METHODS = ("get", "post", "put", "patch", "delete")
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { overflow: auto; padding: .6rem; border: 1px solid #8886; border-radius: 6px }
details { border-bottom: 1px solid #8884; padding: .35rem 0 }
summary { cursor: pointer }
table { border-collapse: collapse }
td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top }
.method { display: inline-block; width: 4.5rem; font-weight: 600 }
"""


def docs_page(schema: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI description."""
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    by_tag: dict[str, list[str]] = {}
    for path, calls in schema["paths"].items():
        for method in _METHODS:
            if method in calls:
                tag = str((calls[method].get("tags") or ["other"])[0])
                by_tag.setdefault(tag, []).append("".join(_call(path, method, calls[method])))
    calls_html = "".join(f"<h2>{escape(tag)}</h2>{''.join(found)}" for tag, found in by_tag.items())
    schemas = schema.get("components", {}).get("schemas", {})
    schemas_html = "".join(_schema(name, value) for name, value in sorted(schemas.items()))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f'<h1>{title}</h1><p>The same as JSON: <a href="/openapi.json">/openapi.json</a></p>'
        f"{calls_html}<h2>Schemas</h2>{schemas_html}</body></html>"
    )


def _call(path: str, method: str, call: Mapping[str, Any]) -> Iterator[str]:
    summary = escape(str(call.get("summary", "")))
    yield f'<details><summary><span class="method">{method.upper()}</span>'
    yield f"<code>{escape(path)}</code> {summary}</summary>"
    if text := call.get("description"):
        yield f"<p>{escape(str(text))}</p>"
    if parameters := call.get("parameters"):
        yield "<table><tr><th>parameter<th>in<th>schema</tr>"
        for each in parameters:
            needed = " (required)" if each.get("required") else ""
            yield f"<tr><td><code>{escape(each['name'])}</code>{needed}<td>{escape(each['in'])}"
            yield f"<td><code>{escape(json.dumps(each.get('schema', {})))}</code></tr>"
        yield "</table>"
    for kind, content in call.get("requestBody", {}).get("content", {}).items():
        text = json.dumps(content.get("schema", {}), indent=1)
        yield f"<p>Body: <code>{escape(kind)}</code></p><pre>{escape(text)}</pre>"
    yield "</details>"


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    text = escape(json.dumps(schema, indent=1))
    return f"<details><summary><code>{escape(name)}</code></summary><pre>{text}</pre></details>"
