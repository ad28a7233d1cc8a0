"""Pictures of condition numbers: plain values in, a matplotlib figure out.

matplotlib is imported when a figure is made, not before, and pyplot never: nothing here touches a global state.
"""

from lit_cond.plots.heat_map import HeatMap, heat_map
from lit_cond.plots.lines import Line, Panel, curves
from lit_cond.plots.names import QUANTITIES, describe, format_number, natural_key, short_names
from lit_cond.plots.spectra import Histogram, histograms, spectra
from lit_cond.plots.style import colour

__all__ = [
    "HeatMap",
    "Histogram",
    "Line",
    "Panel",
    "QUANTITIES",
    "colour",
    "curves",
    "describe",
    "format_number",
    "heat_map",
    "histograms",
    "natural_key",
    "short_names",
    "spectra",
]
