"""Whether the server in this container is ready: exits with 0 or with 1 and the reason, for a HEALTHCHECK.

It asks by the settings that the server has from its environment. The certificate is not judged, as it is for other
names than this machine's.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping

ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Where to ask a server that listens on all addresses."""


def address(environment: Mapping[str, str]) -> str:
    """Where the server says whether it is ready."""
    scheme = "https" if environment.get("WEFT_TLS_CERT") else "http"
    host = environment.get("WEFT_HOST", "")
    shown = ANYWHERE.get(host) or (f"[{host}]" if ":" in host else host)
    return f"{scheme}://{shown}:{environment.get('WEFT_HTTP_PORT') or 8000}/v2/health/ready"


def problem(url: str) -> str:
    """Why it is not ready; nothing if it is."""
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=anyone))
    try:
        with direct.open(url, timeout=4):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return error.read(1000).decode("utf-8", "replace") or str(error)
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(problem(address(os.environ)) or 0)
