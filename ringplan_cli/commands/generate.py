"""`ringplan generate`: one answer, streamed to the terminal."""

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from engine_service.config import EngineSettings
from ringplan.inference.v1 import inference_pb2
from ringplan_cli.errors import BadSettingsError, CommandError
from ringplan_cli.generate_options import GenerateOptions, build_request
from ringplan_cli.inference_client import InferenceClient
from ringplan_cli.local_run import run_local_stack
from ringplan_cli.local_stack import LocalStack
from ringplan_cli.run_report import AnswerTimes, Metrics, build_rows, fetch_metrics, print_report
from ringplan_cli.settings_flags import build_flags, build_settings, read_given, with_parameters
from ringplan_cli.word_wrap import WordWrapper

app = typer.Typer(add_completion=False)

DEFAULT_TARGET = str(EngineSettings.model_fields["listen"].default)
MAX_PROMPT_CHARACTERS = 1_000
# gRPC takes a deadline that is too far away for one that is over.
MAX_TIMEOUT_SECONDS = 1e6
ENGINE_FLAGS = (
    "model",
    "dtype",
    "num_threads",
    "model_cache",
    "model_cache_dir",
    "page_size",
    "num_pages",
    "ring_depth",
    "cache_mode",
)


@app.command()
@with_parameters(
    [
        *build_flags(GenerateOptions, panel="Answer"),
        *build_flags(
            EngineSettings,
            panel="Engine (with --local)",
            leave_out=[name for name in EngineSettings.model_fields if name not in ENGINE_FLAGS],
        ),
    ]
)
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads standard input.", show_default=False)],
    target: Annotated[str, typer.Option(help="The engine: 'host:port', 'unix:/path' or a path.")] = DEFAULT_TARGET,
    local: Annotated[bool, typer.Option("--local", help="Start a planner and an engine for this answer.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the answer and nothing else.")] = False,
    timeout_seconds: Annotated[float | None, typer.Option(help="Give up after so long.", show_default=False)] = None,
) -> None:
    """Asks a model and streams its answer."""
    options = build_settings(GenerateOptions, read_given(context, GenerateOptions))
    engine_given = read_given(context, EngineSettings)
    if engine_given and not local:
        raise BadSettingsError(f"--{next(iter(engine_given)).replace('_', '-')} needs --local")
    # Before a model is loaded for nothing.
    if timeout_seconds is not None and not 0 < timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise BadSettingsError(f"--timeout-seconds: must be above 0, at most {MAX_TIMEOUT_SECONDS:g}")
    prompt = _read_prompt(prompt)
    notes = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
    with ExitStack() as resources:
        stack = None
        if local:
            stack = resources.enter_context(run_local_stack(notes, engine_given))
            target = stack.target
        client = resources.enter_context(InferenceClient(target))
        try:
            _answer(client, notes, prompt, options, timeout_seconds, stack)
        except CommandError:
            # A process that died says more than the call that broke with it.
            if stack is not None:
                stack.check_running()
            raise


def _answer(
    client: InferenceClient,
    notes: Console,
    prompt: str,
    options: GenerateOptions,
    timeout_seconds: float | None,
    stack: LocalStack | None,
) -> None:
    """Asks, prints the answer as it comes, and then what it took."""
    info = client.fetch_model_info()
    request = build_request(prompt, options, has_chat_template=info.has_chat_template)
    notes.print(f"[dim]model: {escape(info.model)}, {info.max_context_tokens:,} tokens of context[/]")
    notes.print(f"\n[bold]{escape(_shorten(make_printable(prompt.strip())))}[/]\n", soft_wrap=False)

    times = AnswerTimes(time.monotonic())
    final = inference_pb2.GenerateFinal()
    with _open_output() as write:
        for response in client.generate(request, timeout_seconds):
            if response.HasField("final"):
                final = response.final
            times.add_tokens(len(response.delta.token_ids), time.monotonic())
            write(response.delta.text)

    metrics: Metrics | None = None
    if stack is not None and not notes.quiet:
        metrics = fetch_metrics(stack.planner_metrics_url, stack.engine_metrics_url)
    notes.print()
    if final.finish_reason == inference_pb2.FINISH_REASON_LENGTH:
        notes.print("[dim]cut off at the most tokens allowed: --max-tokens raises that[/]")
    print_report(notes, build_rows(times, final.usage.prompt_tokens, final.usage.completion_tokens, metrics))


def _read_prompt(prompt: str) -> str:
    """Returns the prompt; '-' stands for standard input."""
    try:
        if prompt == "-":
            prompt = sys.stdin.read()
        prompt.encode()
    except UnicodeError as error:
        raise BadSettingsError("the prompt is not valid UTF-8") from error
    return prompt


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_PROMPT_CHARACTERS else f"{text[:MAX_PROMPT_CHARACTERS]} ..."


@contextmanager
def _open_output() -> Iterator[Callable[[str], None]]:
    """Yields what prints more of the answer: word by word on a terminal, elsewhere as it comes."""
    wrapper = WordWrapper(Console().width) if sys.stdout.isatty() else None
    has_text = False

    def write(text: str) -> None:
        nonlocal has_text
        has_text = has_text or bool(text)
        _print(wrapper.add(make_printable(text)) if wrapper else text)

    try:
        yield write
    finally:
        # An answer that was refused leaves no empty line, nor does one that could not be written.
        if has_text and sys.stdout is not None:
            _print((wrapper.finish() if wrapper else "") + "\n")


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # Whoever read it has had enough: the command ends in silence.
    except OSError as error:
        # What it still holds would be written once more at exit, and fail once more.
        sys.stdout = None
        raise CommandError(f"the answer cannot be written: {error.strerror}") from error


def make_printable(text: str) -> str:
    """Takes out what would act on a terminal instead of showing: a model's words are not its commands.

    Args:
        text: to be shown.
    """
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")
