"""`specjax serve`: an OpenAI-compatible endpoint."""

import os
from dataclasses import dataclass
from ipaddress import ip_address

from specjax.cli.decoding_options import MethodOptions
from specjax.core.errors import SpecjaxError
from specjax.core.settings import setting

KEY = "SPECJAX_API_KEY"
SHUTDOWN_SECONDS = 30  # for the texts that are being generated


@dataclass(frozen=True)
class Serve(MethodOptions):
    """Serve a target to OpenAI's clients: completions and chats, at http://HOST:PORT/v1.

    Prompts are served in order, and get the texts of `specjax generate`; the first request with new
    settings waits for compilation. To listen beyond this machine, set the environment variable
    SPECJAX_API_KEY to a key; every client, local ones too, must then send it.

      specjax serve --target FOLDER --method pld-plus --port 8000
    """

    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 listens at all addresses of this machine."""
    port: int = setting(8000, at_least=0, at_most=65535)
    """The port to listen at; 0 takes a free one."""
    max_waiting: int = setting(64, at_least=1)
    """The maximum number of waiting prompts; further requests get status 429."""
    batch: int = setting(1, at_least=1)
    """The number of prompts with the same settings that run together."""
    prefixes: int = setting(1, at_least=0)
    """The number of finished texts whose cache is kept, for prompts that begin with them."""

    def run(self) -> None:
        key = os.environ.get(KEY) or None
        if key is None and not _is_local(self.host):
            raise SpecjaxError(
                f"--host {self.host} lets others in; set the environment variable {KEY} to the key "
                "that they must send"
            )
        try:
            import uvicorn

            from specjax.serve.app import make_app
        except ImportError as error:
            raise SpecjaxError(
                f"specjax serve needs {error.name}; run pip install 'specjax[serve]'"
            ) from None
        from specjax.serve.worker import Worker

        target, drafter = self.load_method()
        target.require_tokenizer()
        limits = self.max_new_tokens, self.max_waiting
        worker = Worker(target, drafter, *limits, self.batch, self.prefixes)
        uvicorn.run(
            make_app(worker, key, self.host),
            host=self.host,
            port=self.port,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
