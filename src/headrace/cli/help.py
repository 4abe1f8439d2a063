"""How help is written: plain text that wraps, options under their headings, no line cut short.

The boxes of typer leave a terminal of 80 columns about 20 for what an option does, cut long names
of options, and need a library that takes 80 ms.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command; `rich_help_panel` is the heading of an option."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options without a heading, then the others."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_option = parameter.param_type_name == "option"
                panel = getattr(parameter, "rich_help_panel", None)
                name = (panel or "Options") if is_option else "Arguments"
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class CommandGroup(TyperGroup):
    """A command of commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options, and of each command the whole first line of its help."""
        options = [p.get_help_record(ctx) for p in self.get_params(ctx)]
        with formatter.section("Options"):
            formatter.write_dl([record for record in options if record is not None])
        with formatter.section("Commands"):
            formatter.write_dl(
                [(n, str(c.help or "").split("\n\n")[0]) for n, c in self.commands.items()]
            )
