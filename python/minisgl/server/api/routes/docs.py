"""The OpenAPI document and the pages that show it: /openapi.json, /docs (Swagger UI) and /redoc.

The pages' files come from the package fastapi-offline, and browsers are told to load nothing from elsewhere. Addresses
are relative, so that they hold behind a proxy with --root-path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from minisgl.server.api.routes.endpoint import Endpoint, Json, json_response

FAVICON = "docs/favicon.png"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; worker-src blob:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
}


class DocsRoutes:
    def __init__(self, document: Callable[[], Json]) -> None:
        """`document` returns the OpenAPI document, which it makes at its first call."""
        self._document = document
        self._files = StaticFiles(packages=[("fastapi_offline", "static")])

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/openapi.json", self.openapi, documented=False),
            Endpoint("/docs", self.swagger, documented=False),
            Endpoint("/redoc", self.redoc, documented=False),
            Endpoint("/docs/{file}", self.file, documented=False),
        ]

    async def openapi(self, _request: Request) -> Response:
        """Return the OpenAPI document."""
        # In a thread, because it takes longer at the first call than other requests' streams should wait.
        return json_response(await asyncio.to_thread(self._document))

    async def swagger(self, _request: Request) -> Response:
        """Return the page of Swagger UI."""
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title="Minisgl",
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url=FAVICON,
        )
        return HTMLResponse(page.body, headers=HEADERS)

    async def redoc(self, _request: Request) -> Response:
        """Return the page of ReDoc."""
        page = get_redoc_html(
            openapi_url="openapi.json",
            title="Minisgl",
            redoc_js_url="docs/redoc.standalone.js",
            redoc_favicon_url=FAVICON,
            with_google_fonts=False,
        )
        return HTMLResponse(page.body, headers=HEADERS)

    async def file(self, request: Request) -> Response:
        """Return a file of the pages."""
        return await self._files.get_response(request.path_params["file"], request.scope)
