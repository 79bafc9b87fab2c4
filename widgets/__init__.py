"""Live views of the ranks: widgets in the browser, with static HTML, text and SVG for saved notebooks and terminals.

The views draw plain data and do not know the cluster: they get it through the protocols in live_view.py. The
JavaScript and CSS of the widgets are in static/.

live_view.py     base widget and models of live views; early delivery of messages, throttling, display helpers
rendering.py     palette, SVG elements, bars, tables, results as tables, ANSI colours as HTML, a cell's state
placement.py     hosts, devices and ranks
shards.py        shards of a variable's tensors
checkpoints.py   running saves and the checkpoints in a folder
output_panel.py  a cell's output by rank
"""
