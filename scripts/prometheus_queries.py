"""Asks a Prometheus for series over time."""

import json
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TIMEOUT_SECONDS = 30.0


class Series(NamedTuple):
    """One series: its labels, and its samples in the order of time."""

    labels: dict[str, str]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


class Prometheus:
    """A Prometheus server.

    Args:
        url: its address, as `http://127.0.0.1:9090`.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        """Evaluates a query at steps over a time.

        Args:
            expr: PromQL.
            start: the first step, in seconds since 1970.
            end: the last step.
            step: seconds between two steps.

        Returns:
            The series by their labels.

        Raises:
            ValueError: Prometheus does not accept the query, or there is none at the address.
        """
        arguments = urllib.parse.urlencode({"query": expr, "start": start, "end": end, "step": step})
        try:
            request = urllib.request.Request(f"{self._url}/api/v1/query_range", arguments.encode())
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expr}: {error.read().decode(errors='replace')}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise ValueError(f"no Prometheus answers at {self._url}: {error}") from error
        found = [
            Series(
                series["metric"],
                np.array([time for time, _ in series["values"]], np.float64),
                np.array([float(value) for _, value in series["values"]], np.float64),
            )
            for series in answer["data"]["result"]
        ]
        return sorted(found, key=lambda series: sorted(series.labels.items()))
