"""The `belayer` command: what it lists, how an error leaves it, and that nothing is imported unasked."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from belayer_env.cli import commands, main
from belayer_env.cli.commands import COMMANDS, bench_app
from belayer_env.cli.lazy import add_lazy_command, load_target
from belayer_env.cli.main import Settings, make_app
from belayer_env.errors import SetupError

runner = CliRunner()


@dataclass
class Entry:
    """An installed package's entry point, made by hand."""

    loaded: Any
    value: str = "some_package:register"

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def give_entries(monkeypatch: pytest.MonkeyPatch, module: Any, *entries: Entry) -> None:
    monkeypatch.setattr(module, "entry_points", lambda *, group: list(entries))


def run_belayer(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "from belayer_env.cli.main import main; main()", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def test_version_is_the_installed_one() -> None:
    done = run_belayer("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("belayer ")


def test_every_command_of_the_table_exists_and_has_help() -> None:
    app = make_app(Settings())
    for name, (target, summary) in COMMANDS.items():
        assert callable(load_target(target)), name
        assert summary.endswith("."), name
        assert runner.invoke(app, [name, "--help"]).exit_code == 0, name


def test_help_of_the_command_imports_no_subcommand() -> None:
    code = (
        "import sys; from belayer_env.cli.main import Settings, make_app;"
        "from typer.testing import CliRunner;"
        "assert CliRunner().invoke(make_app(Settings()), ['--help']).exit_code == 0;"
        "sys.exit(any(name in sys.modules for name in ('belayer_env.cli.setup', 'belayer_env.cli.doctor')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_unknown_command_and_unknown_option_are_usage_errors() -> None:
    app = make_app(Settings())
    assert runner.invoke(app, ["no-such-command"]).exit_code == 2
    assert runner.invoke(app, ["doctor", "--no-such-option"]).exit_code == 2


@pytest.mark.parametrize("option", [[], ["--debug"]])
def test_our_error_ends_with_its_message_and_a_traceback_only_on_demand(
    option: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise SetupError("no loop devices: run `belayer setup --no-store`")

    def register(app: typer.Typer) -> None:
        app.command("broken")(broken)

    give_entries(monkeypatch, main, Entry(register))
    monkeypatch.setattr(sys, "argv", ["belayer", *option, "broken"])
    if option:
        with pytest.raises(SetupError):
            main.main()
        return
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 1
    shown = capsys.readouterr()
    assert shown.err.strip() == "belayer: no loop devices: run `belayer setup --no-store`"
    assert shown.out == ""


def test_a_package_that_cannot_be_imported_does_not_take_the_others_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def register(app: typer.Typer) -> None:
        app.command("fine")(lambda: typer.echo("fine"))
        app.command("other")(lambda: None)

    give_entries(monkeypatch, main, Entry(ImportError("no torch"), "rollout:register"), Entry(register))
    assert runner.invoke(make_app(Settings()), ["fine"]).exit_code == 0
    assert "rollout:register" in capsys.readouterr().err


def test_a_lazy_command_parses_its_own_options_and_is_loaded_only_when_called() -> None:
    loads = []

    def count(times: Annotated[int, typer.Option()] = 1) -> None:
        typer.echo(f"times={times}")
        raise typer.Exit(3)

    def load() -> Any:
        loads.append("loaded")
        return count

    app = typer.Typer()
    add_lazy_command(app, "count", "Count.", load)
    add_lazy_command(app, "other", "Never called.", load)
    assert "Count." in runner.invoke(app, ["--help"]).output
    assert loads == []
    answer = runner.invoke(app, ["count", "--times", "5"])
    assert (answer.exit_code, answer.output.strip()) == (3, "times=5")
    assert loads == ["loaded"]


def test_every_package_adds_its_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(app: typer.Typer) -> None:
        app.command("checkpoint")(lambda: typer.echo("pause"))

    def two(app: typer.Typer) -> None:
        app.command("failover")(lambda: typer.echo("takeover"))

    give_entries(monkeypatch, commands, Entry(one), Entry(two))
    assert runner.invoke(bench_app(), ["failover"]).output.strip() == "takeover"
    app = typer.Typer()
    add_lazy_command(app, "bench", "Benches.", bench_app)
    add_lazy_command(app, "other", "Other.", bench_app)
    assert runner.invoke(app, ["bench", "checkpoint"]).output.strip() == "pause"
