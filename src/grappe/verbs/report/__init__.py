"""The report: runs and measurements gathered into one HTML file that opens anywhere, offline."""
