//! How long restarts took, by the daemon's log.

use std::time::{Duration, SystemTime};

use super::Node;

/// When workers said in the log that they serve.
fn readies(node: &Node) -> Vec<SystemTime> {
    let log = node.log();
    let lines = log.lines().filter(|line| line.contains("took_over=true"));
    lines
        .filter_map(|line| time_of(line.split(' ').next()?))
        .collect()
}

/// The time in `2026-01-31T23:59:59.123456Z`.
pub(crate) fn time_of(text: &str) -> Option<SystemTime> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let numbers = |text: &str, by| -> Option<Vec<u64>> {
        text.split(by).map(|part| part.parse().ok()).collect()
    };
    let (date, (time, fraction)) = (numbers(date, '-')?, time.split_once('.')?);
    let (time, micros) = (numbers(time, ':')?, fraction.parse::<u64>().ok()?);
    let [year, month, day]: [u64; 3] = date.try_into().ok()?;
    let [hour, minute, second]: [u64; 3] = time.try_into().ok()?;
    // Days since 1970, by years that begin in March.
    let (year, month): (u64, u64) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let seconds = (days - 719_468) * 86_400 + hour * 3600 + minute * 60 + second;
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_micros(micros))
}

/// Says how long it took from each kill until the next worker served, where one did before the next
/// kill.
pub(crate) fn restarts(node: &Node, killed: &[SystemTime]) -> String {
    let ready = readies(node);
    let mut took: Vec<Duration> = Vec::new();
    for (number, at) in killed.iter().enumerate() {
        let first = ready.iter().find(|ready| *ready > at);
        let next = killed.get(number + 1);
        if let Some(first) = first.filter(|first| next.is_none_or(|next| *first < next)) {
            took.extend(first.duration_since(*at));
        }
    }
    took.sort();
    let at = |part: usize| took.get(took.len().saturating_sub(1) * part / 100);
    format!(
        "{} kills; from a kill to serving in {} cases: median {:?}, 99th percentile {:?}, longest {:?}",
        killed.len(),
        took.len(),
        at(50),
        at(99),
        at(100)
    )
}
