"""The fields of dataclasses: checked when an object is made, and as JSON."""
