//! The day, for templates that tell it.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A time of UTC as `strftime` of C writes it in English.
///
/// # Errors
/// For a directive that is not known here.
pub(super) fn strftime(time: SystemTime, format: &str) -> Result<String, Error> {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (of_month, of_week) = (MONTHS[month as usize - 1], DAYS[((days + 4) % 7) as usize]);
    let twelve = match hour % 12 {
        0 => 12,
        hour => hour,
    };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let width = if bare { 1 } else { 2 };
        let mut two = |number: u64| out += &format!("{number:0width$}");
        match directive {
            Some('d') => two(day),
            Some('m') => two(month),
            Some('H') => two(hour),
            Some('I') => two(twelve),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('y') => two(year % 100),
            Some('Y') => out += &format!("{year}"),
            Some('B') => out.push_str(of_month),
            Some('b' | 'h') => out.push_str(&of_month[..3]),
            Some('A') => out.push_str(of_week),
            Some('a') => out.push_str(&of_week[..3]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out += &format!("{year}-{month:02}-{day:02}"),
            Some('T') => out += &format!("{hour:02}:{minute:02}:{second:02}"),
            Some('%') => out.push('%'),
            other => {
                let other = other.map_or(String::new(), String::from);
                let why = format!("strftime_now: %{other} is not known here");
                return Err(Error::new(ErrorKind::InvalidOperation, why));
            }
        }
    }
    Ok(out)
}

/// Year, month and day of so many days after 1 January 1970.
fn date(days: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(is_leap(year)) {
        left -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (month, length) in (1..).zip(lengths) {
        if left < length {
            return (year, month, left + 1);
        }
        left -= length;
    }
    (year, 12, 31)
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
        assert!(at(0, "%Q").is_err_and(|e| e.contains("%Q is not known here")));
    }
}
