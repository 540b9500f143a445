"""Text in lines of a given width."""

from wrapline.wrap import wrap

__all__ = ["wrap"]
