"""How the command line's plots look, and the only place that loads matplotlib."""

from types import ModuleType

from ringplan_cli.errors import CommandError

DOTS_PER_INCH = 144
# Colours that people who see fewer of them can tell apart (Okabe and Ito's).
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
STYLE = {
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "font.size": 10,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": True,
    "legend.framealpha": 0.9,
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}


def import_matplotlib() -> ModuleType:
    """Returns matplotlib, set to draw into files.

    Raises:
        CommandError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise CommandError("plots need matplotlib: pip install 'ringplan[bench]'") from error
    mpl.use("agg")
    return mpl
