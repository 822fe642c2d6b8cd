"""Views that figures, tables and pages share: ranked layouts, grouped variables, costly work, thinned
timelines."""
