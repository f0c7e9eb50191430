"""What everything stands on: shapes, errors, pytrees, checks, devices, rotary tables."""
