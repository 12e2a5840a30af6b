"""Names that users of other frameworks know, for what Paceline does. Nothing else in Paceline imports them."""
