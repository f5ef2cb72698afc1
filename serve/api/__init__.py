"""The HTTP surface: what comes in, what goes out, who may."""
