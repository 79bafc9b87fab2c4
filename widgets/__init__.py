"""What a person sees of the ranks.

Owns: pictures of plain data, live in the browser and still in HTML, text and SVG, so that a saved notebook and a
terminal show something true. Refuses: to know where the data comes from.

handle.py             a background cell's state
table.py              a small table, such as the status of the ranks
feed.py               the seams: where views get their data, whom they tell what was clicked
drawing.py            the palette, SVG and bars
pace.py               at most ten updates a second, the last one always
part.py               what each picture offers to whatever shows it
screen.py             puts outputs into the notebook
threads.py            threads, also while the interpreter shuts down
talking.py            a widget that hears its browser while a cell runs; JavaScript is in static/
live.py               a view with a comm: who looks, what is sent, what was clicked
placement.py          what every rank holds and does
placement_picture.py  the same as HTML, text and SVG
shards.py             where the parts of every tensor are
shards_picture.py     the same as HTML, text and SVG
checkpoints.py        saves as they happen, what lies in a folder
checkpoints_picture.py  the same as HTML, text and SVG
panel.py              a cell's output by rank, live
panel_picture.py      the same as HTML and text
ansi.py               a terminal's colours as HTML
dashboard.py          placement, shards and checkpoints as tabs, one for a notebook
"""
