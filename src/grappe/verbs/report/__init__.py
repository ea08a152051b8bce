"""The report: runs and measurements in one HTML file that opens offline in any browser."""
