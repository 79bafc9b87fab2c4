"""Render views as HTML, text and SVG."""
