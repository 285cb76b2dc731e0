"""Drawings of boxes and arrows on matplotlib's axes, told apart in grey print as well."""

KIB, MIB, GB = 2**10, 2**20, 10**9
KINDS = {
    "memory": {"color": "white", "edgecolor": "black"},
    "chip": {"color": "#b5d3ea", "edgecolor": "black"},
    "now": {"color": "#0b3c6b", "edgecolor": "black"},
    "done": {"color": "#e6e6e6", "edgecolor": "black"},
    "later": {"color": "none", "edgecolor": "#aaaaaa", "linestyle": ":"},
    "frame": {"color": "none", "edgecolor": "black", "linewidth": 1.5},
}


def bare(axes, width, height, title):
    """Make of axes a sheet of width x height units, y downwards, with a title and no ticks."""
    axes.clear()
    axes.set(xlim=(-0.05, width), ylim=(height, -0.05), aspect="equal")
    axes.set_title(title, size=10)
    axes.axis("off")


def write(axes, x, y, text, size=8, **options):
    """Write text around (x, y), or where the options of axes.text say."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "size": size, **options})


def box(axes, x, y, text="", kind="memory", width=1.0, height=1.0, size=9, **options):
    """Draw a rectangle whose upper left corner is (x, y), with text in it."""
    axes.barh(y, width, height, left=x, align="edge", **KINDS[kind], **options)
    write(axes, x + width / 2, y + height / 2, text, size,
          color="white" if kind == "now" else "black")


def arrow(axes, start, end):
    """Draw an arrow between two points (x, y)."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "black",
                                              "shrinkA": 0, "shrinkB": 0})


def size_text(count):
    """Show a number of bytes in the unit that suits it."""
    unit, name = next(u for u in ((GB, "GB"), (MIB, "MiB"), (KIB, "KiB")) if count >= u[0])
    return f"{count / unit:.3g} {name}"
