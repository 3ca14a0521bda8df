//! Quantities as people write and read them.

use std::str::FromStr;
use std::time::Duration;

/// A number of bytes from the command line: `1048576`, `512m`, `2g`, `1.5GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("{text:?} is not a size: write a number and k, m, g or t, such as 512m");
        let lower = text.to_ascii_lowercase();
        let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = lower.get(digits.len()..).unwrap_or_default();
        let shift = match unit {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(wrong()),
        };
        let (whole, thousandths) = decimal(digits).ok_or_else(wrong)?;
        let unit = 1u64 << shift;
        let bytes = whole
            .checked_mul(unit)
            .and_then(|b| b.checked_add(u64::from(thousandths) * unit / 1000))
            .ok_or_else(wrong)?;
        if bytes == 0 {
            Err(wrong())
        } else {
            Ok(Self(bytes))
        }
    }
}

/// A span of time from the command line: `90s`, `15m`, `24h`, `7d`; `0` needs no unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span(pub(crate) Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("{text:?} is not a span of time: write a number and s, m, h or d, such as 24h")
        };
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        let seconds = match text.get(digits.len()..).unwrap_or_default() {
            "" if number == 0 => 1,
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => return Err(wrong()),
        };
        let seconds = number.checked_mul(seconds).ok_or_else(wrong)?;
        Ok(Self(Duration::from_secs(seconds)))
    }
}

/// A share of processors from the command line, in thousandths of one: `2`, `0.5`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cpus {
    /// Thousandths of a processor, at least 10.
    pub(crate) milli: u64,
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not a number of processors: write one such as 2 or 0.5, at least 0.01"
            )
        };
        let (whole, thousandths) = decimal(text).ok_or_else(wrong)?;
        match whole
            .checked_mul(1000)
            .and_then(|m| m.checked_add(u64::from(thousandths)))
        {
            Some(milli) if milli >= 10 => Ok(Self { milli }),
            _ => Err(wrong()),
        }
    }
}

impl Cpus {
    /// The number of processors.
    pub(crate) fn as_f64(self) -> f64 {
        f64::from(u32::try_from(self.milli).unwrap_or(u32::MAX)) / 1000.0
    }
}

/// A length of time from the command line: `90s`, `30m`, `12h`, `7d`, `2w`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Age(pub(crate) Duration);

impl FromStr for Age {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is no length of time: write a number and s, m, h, d or w, such as 12h"
            )
        };
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = match text.get(digits.len()..).unwrap_or_default() {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            "w" => 604_800,
            _ => return Err(wrong()),
        };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(wrong());
        }
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        let seconds = number.checked_mul(unit).ok_or_else(wrong)?;
        Ok(Self(Duration::from_secs(seconds)))
    }
}

/// Splits a plain decimal into its whole part and thousandths; more digits are cut off.
fn decimal(text: &str) -> Option<(u64, u16)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || text.ends_with('.') {
        return None;
    }
    let thousandths: String = fraction.chars().chain("000".chars()).take(3).collect();
    Some((whole.parse().ok()?, thousandths.parse().ok()?))
}

/// A byte count for people: `17 B`, `4.0 KiB`, `1.3 GiB`.
pub(crate) fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut tenths = u128::from(bytes) * 10 / 1024;
    let mut unit = "KiB";
    for next in UNITS.into_iter().skip(1) {
        if tenths < 10_240 {
            break;
        }
        tenths /= 1024;
        unit = next;
    }
    format!("{}.{} {unit}", tenths / 10, tenths % 10)
}

/// A number of seconds for people: `12s`, `5m`, `3h`, `9d`.
pub(crate) fn human_age(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_docker_reads_them() {
        for (text, bytes) in [
            ("1", 1),
            ("1b", 1),
            ("4k", 4096),
            ("512m", 512 << 20),
            ("2G", 2 << 30),
            ("1.5GiB", 3 << 29),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in [
            "",
            "m",
            "-1",
            "1x",
            "1.m",
            "0",
            "99999999999t",
            "1e3",
            "0x10",
        ] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn spans_have_a_unit() {
        for (text, seconds) in [
            ("0", 0),
            ("0s", 0),
            ("90s", 90),
            ("15m", 900),
            ("7d", 604_800),
        ] {
            let span = Span(Duration::from_secs(seconds));
            assert_eq!(text.parse(), Ok(span), "{text}");
        }
        for text in ["", "s", "1", "-1s", "1.5h", "1w", "99999999999999999d"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }

    #[test]
    fn processors_are_thousandths() {
        assert_eq!("2".parse(), Ok(Cpus { milli: 2000 }));
        assert_eq!("0.25".parse(), Ok(Cpus { milli: 250 }));
        for text in ["0", "0.001", "-1", "one", "1.", ".5"] {
            assert!(text.parse::<Cpus>().is_err(), "{text}");
        }
    }

    #[test]
    fn ages_have_a_unit() {
        assert_eq!("12h".parse(), Ok(Age(Duration::from_secs(43_200))));
        assert_eq!("0s".parse(), Ok(Age(Duration::ZERO)));
        for text in ["", "h", "12", "-1h", "1.5h", "1y", "99999999999999999999w"] {
            assert!(text.parse::<Age>().is_err(), "{text}");
        }
    }

    #[test]
    fn byte_counts_are_short() {
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(4096), "4.0 KiB");
        assert_eq!(human_bytes(1 << 30), "1.0 GiB");
        assert_eq!(human_bytes(u64::MAX), "16777215.9 TiB");
    }
}
