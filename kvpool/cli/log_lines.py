"""Log lines of a service on standard error: as text, or each as one JSON object."""

from __future__ import annotations

import json
import logging
import sys
import time
from enum import Enum


class LogLevel(str, Enum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(str, Enum):
    """How a line is written."""

    TEXT = "text"
    JSON = "json"


class JsonLines(logging.Formatter):
    """``time`` (UTC), ``level``, ``logger``, ``message``; ``exception`` with its stack, where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: LogLevel, form: LogFormat) -> None:
    """What kvpool logs goes to standard error from now on, and nowhere else. Again: with the new level and form."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form is LogFormat.JSON else text)
    logger = logging.getLogger("kvpool")
    logger.handlers = [handler]
    logger.setLevel(level.value.upper())
    logger.propagate = False
