//! Ids on disk and ids as a sandbox sees them.

use crate::error::{PackError, Result};
use crate::options::IdMapRange;

/// A map for user or group ids.
#[derive(Debug, Clone)]
pub(crate) struct IdMap {
    what: &'static str,
    ranges: Vec<IdMapRange>,
}

impl IdMap {
    /// Checks that the ranges are possible and do not overlap. No range: ids stay as they are.
    pub(crate) fn new(what: &'static str, ranges: &[IdMapRange]) -> Result<Self> {
        let bad = |why: &str| PackError::InvalidOption {
            option: format!("{what} id map"),
            why: why.to_owned(),
        };
        for (index, range) in ranges.iter().enumerate() {
            let fits = |first: u32| range.count > 0 && first.checked_add(range.count - 1).is_some();
            if !fits(range.inside) || !fits(range.outside) {
                return Err(bad("a range is empty or goes beyond 32 bits"));
            }
            for other in ranges.iter().take(index) {
                if overlap(range.inside, range.count, other.inside, other.count)
                    || overlap(range.outside, range.count, other.outside, other.count)
                {
                    return Err(bad("two ranges overlap"));
                }
            }
        }
        Ok(Self {
            what,
            ranges: ranges.to_vec(),
        })
    }

    /// Whether all ids stay as they are.
    pub(crate) fn is_identity(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The id inside of one on disk.
    pub(crate) fn inside(&self, path: &[u8], outside: u32) -> Result<u32> {
        if self.ranges.is_empty() {
            return Ok(outside);
        }
        let found = self.ranges.iter().find_map(|range| {
            let offset = outside.checked_sub(range.outside)?;
            (offset < range.count).then(|| range.inside + offset)
        });
        found.ok_or_else(|| {
            let why = format!(
                "its {} {outside} is outside of the id map; give it an owner within the map, widen the map, or exclude it",
                self.what
            );
            PackError::unsupported(path, why)
        })
    }
}

fn overlap(a: u32, a_count: u32, b: u32, b_count: u32) -> bool {
    let end = |first: u32, count: u32| u64::from(first) + u64::from(count);
    u64::from(a) < end(b, b_count) && u64::from(b) < end(a, a_count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(inside: u32, outside: u32, count: u32) -> IdMapRange {
        IdMapRange {
            inside,
            outside,
            count,
        }
    }

    #[test]
    fn ids_are_mapped_back() {
        let map = IdMap::new("owner", &[range(0, 100_000, 1000), range(1000, 1000, 1)]).unwrap();
        assert_eq!(map.inside(b"", 100_000).unwrap(), 0);
        assert_eq!(map.inside(b"", 100_999).unwrap(), 999);
        assert_eq!(map.inside(b"", 1000).unwrap(), 1000);
        for outside in [0, 999, 1001, 99_999, 101_000, u32::MAX] {
            let error = map.inside(b"a/file", outside).unwrap_err().to_string();
            assert!(
                error.contains("a/file") && error.contains(&outside.to_string()),
                "{error}"
            );
        }
        assert_eq!(IdMap::new("owner", &[]).unwrap().inside(b"", 7).unwrap(), 7);
        let all = IdMap::new("owner", &[range(0, 0, u32::MAX)]).unwrap();
        assert_eq!(all.inside(b"", u32::MAX - 1).unwrap(), u32::MAX - 1);
    }

    #[test]
    fn impossible_maps_are_refused() {
        for ranges in [
            vec![range(0, 0, 0)],
            vec![range(1, 0, u32::MAX), range(5, 5, 1)],
            vec![range(u32::MAX, 0, 2)],
            vec![range(0, 10, 5), range(4, 100, 1)],
            vec![range(0, 10, 5), range(10, 14, 1)],
        ] {
            assert!(IdMap::new("owner", &ranges).is_err(), "{ranges:?}");
        }
    }
}
