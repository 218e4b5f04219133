"""Print the figures of the campaign at the end of a run."""

from tests.campaign.test_campaign import PROPERTY


def pytest_terminal_summary(terminalreporter):
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for name, value in report.user_properties:
                    if name == PROPERTY:
                        terminalreporter.write_line(value)
