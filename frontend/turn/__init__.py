"""One answer in no API's terms: what is asked, and the events that answer it."""
