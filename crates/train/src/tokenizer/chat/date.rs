//! Formats the date, for templates that print it.

use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;
use chrono::format::{Item, StrftimeItems};
use minijinja::{Error, ErrorKind};

/// A UTC time, formatted like C's `strftime` in English.
///
/// # Errors
/// Returns an error for an unsupported directive.
pub(super) fn strftime(time: SystemTime, format: &str) -> Result<String, Error> {
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.contains(&Item::Error) {
        let why = format!("strftime_now: {format:?} has a directive that is not known here");
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let time = DateTime::from_timestamp(seconds as i64, 0).unwrap_or_default();
    Ok(time.format_with_items(items.iter()).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn days_are_those_of_the_calendar() {
        let at = |seconds: u64, format: &str| {
            strftime(UNIX_EPOCH + Duration::from_secs(seconds), format).map_err(|e| e.to_string())
        };
        assert_eq!(at(0, "%A, %d %B %Y %H:%M:%S"), Ok("Thursday, 01 January 1970 00:00:00".into()));
        assert_eq!(at(951_782_400, "%Y-%m-%d %a"), Ok("2000-02-29 Tue".into()));
        assert_eq!(
            at(1_721_984_461, "%-d %b %y, %I:%M %p %F %T %%"),
            Ok("26 Jul 24, 09:01 AM 2024-07-26 09:01:01 %".into())
        );
        assert_eq!(at(4_107_542_399, "%F"), Ok("2100-02-28".into()));
        assert!(
            at(0, "day %Q").is_err_and(|e| e.contains("\"day %Q\" has a directive that is not known here"))
        );
    }
}
