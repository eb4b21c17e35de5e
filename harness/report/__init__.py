"""What measurements say to people: a table a case in a terminal or in Markdown, and one page of all."""
