"""What the lessons share. Importing it finds `common` and loads torch, the only place that does.

cases     the problems            visible   what a query may see, and the inputs cut into tiles
tiles     how large a tile is     judge     when a result is right
fused     the platform's kernel   bench     candidates, verified, profiled and timed alike
formulas  what has to be held     show      tables and plots
traffic   what has to be moved    scratchpad   that counted on running code, cachegrind   in C
machines  chips as data, and what their memory allows
matrix    calls for any kernel    wrong_formulas, wrong_places   faults   kernel_worker   a process
checks    wrong arguments         dropout, learned, autocast, extras, flex   what training adds
triton_tools  what all kernels in Triton need     served   whether they can run     caches   pages
page      the page that play.py fills             sheet      boxes and arrows that draw.py draws
processes ranks                   ring_link, ring_costs, ring_tools, ring_show   between them
lesson    a command line
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import cli, device  # noqa: F401  in this order, and before torch: see there
