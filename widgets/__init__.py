"""What a person sees of the ranks.

Owns: pictures of plain data, in HTML and in text, so that a saved notebook and a terminal show something true. Refuses:
to ask the ranks anything.

handle.py   a background cell's state
table.py    a small table, such as the status of the ranks
"""
