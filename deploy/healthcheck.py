"""Asks the admin port whether the process is up; exit code 0 when it is. For a container's HEALTHCHECK, which has no curl."""

from __future__ import annotations

import http.client
import os
import sys

PORT = int(os.environ.get("COMPACTION_SERVER__ADMIN_PORT", "9464"))


def main() -> int:
    # http.client and not urllib: a proxy in the environment must not be asked for a loopback address
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return int(connection.getresponse().status != 200)
    except OSError:
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
