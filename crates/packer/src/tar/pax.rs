//! PAX extended headers: records `LENGTH KEY=VALUE\n`, and what we take from them.
//!
//! Records of a global header (`g`) hold until replaced; those of a member's own header (`x`)
//! beat them. An empty value takes a record back, so that the header's field counts again, except
//! for extended attributes, where it is the value.

use std::collections::BTreeMap;

use layerpack_erofs::Timestamp;

/// Records in effect for a member.
#[derive(Debug, Clone, Default)]
pub(crate) struct Records {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    /// `GNU.sparse.offset` and `GNU.sparse.numbytes` in order: form 0.0 repeats the keys.
    sparse: Vec<(SparseKey, u64)>,
}

/// Which half of a form 0.0 piece a record gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SparseKey {
    /// Where the piece lies in the file.
    Offset,
    /// How long it is.
    Length,
}

const XATTR: &[u8] = b"SCHILY.xattr.";
const XATTR_LIBARCHIVE: &[u8] = b"LIBARCHIVE.xattr.";

impl Records {
    /// Reads all records of one header's data.
    pub(crate) fn parse(mut data: &[u8]) -> Result<Self, String> {
        let mut records = Self::default();
        // Some writers pad with NULs inside the member's size.
        while data.first().is_some_and(|&byte| byte != 0) {
            let digits = data
                .iter()
                .take(20)
                .position(|&byte| byte == b' ')
                .ok_or("a PAX record has no length")?;
            let length = data
                .get(..digits)
                .and_then(decimal)
                .and_then(|length| usize::try_from(length).ok())
                .ok_or("a PAX record's length is not a number")?;
            let record = data
                .get(digits + 1..length)
                .ok_or("a PAX record's length does not fit its header")?;
            data = data.get(length..).unwrap_or_default();
            let record = record
                .strip_suffix(b"\n")
                .ok_or("a PAX record does not end with a newline")?;
            let equals = record
                .iter()
                .position(|&byte| byte == b'=')
                .ok_or("a PAX record has no equals sign")?;
            let (key, value) = record.split_at(equals);
            let value = value.get(1..).unwrap_or_default();
            records.add(key, value)?;
        }
        Ok(records)
    }

    fn add(&mut self, key: &[u8], value: &[u8]) -> Result<(), String> {
        let piece = match key {
            b"GNU.sparse.offset" => Some(SparseKey::Offset),
            b"GNU.sparse.numbytes" => Some(SparseKey::Length),
            _ => None,
        };
        if let Some(piece) = piece {
            let number = decimal(value).ok_or("a sparse map's number is not one")?;
            self.sparse.push((piece, number));
        } else {
            self.values.insert(key.to_vec(), value.to_vec());
        }
        Ok(())
    }

    /// Takes the records of `newer` over; what `newer` leaves out stays.
    pub(crate) fn overlay(&mut self, newer: Self) {
        self.values.extend(newer.values);
    }

    /// Bytes of keys and values, for a bound.
    pub(crate) fn weight(&self) -> usize {
        self.values
            .iter()
            .map(|(key, value)| key.len() + value.len())
            .sum()
    }
}

/// The records in effect for one member: its own, and below them the global ones.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effective<'a> {
    /// Records of the member's own header.
    pub own: &'a Records,
    /// Records of all global headers so far.
    pub global: &'a Records,
}

impl<'a> Effective<'a> {
    /// A record's value, unless it is empty.
    pub(crate) fn get(&self, key: &str) -> Option<&'a [u8]> {
        let own = self.own.values.get(key.as_bytes());
        let value = own.or_else(|| self.global.values.get(key.as_bytes()))?;
        Some(value.as_slice()).filter(|value| !value.is_empty())
    }

    /// A record's decimal value.
    pub(crate) fn number(&self, key: &str) -> Result<Option<u64>, String> {
        self.get(key)
            .map(|value| {
                decimal(value)
                    .ok_or_else(|| format!("{key} {:?} is not a number", crate::show(value)))
            })
            .transpose()
    }

    /// A record's decimal value of 32 bits.
    pub(crate) fn id(&self, key: &str) -> Result<Option<u32>, String> {
        self.number(key)?
            .map(|id| u32::try_from(id).map_err(|_| format!("{key} {id} does not fit 32 bits")))
            .transpose()
    }

    /// A time record: decimal seconds with an optional sign and fraction.
    pub(crate) fn time(&self, key: &str) -> Result<Option<Timestamp>, String> {
        self.get(key)
            .map(|value| {
                time(value).ok_or_else(|| format!("{key} {:?} is not a time", crate::show(value)))
            })
            .transpose()
    }

    /// The repeated records of sparse form 0.0.
    pub(crate) fn sparse_pieces(&self) -> &'a [(SparseKey, u64)] {
        &self.own.sparse
    }

    /// Extended attributes: only the records with one of the two known prefixes. Where both name
    /// one attribute, `SCHILY` counts.
    pub(crate) fn xattrs(&self) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, String> {
        let mut found = BTreeMap::new();
        for records in [self.global, self.own] {
            for (key, name, value) in records.prefixed(XATTR_LIBARCHIVE) {
                let bad = || {
                    format!(
                        "record {:?} is not encoded as libarchive does",
                        crate::show(key)
                    )
                };
                let name = percent_decode(name).ok_or_else(bad)?;
                found.insert(name, base64_decode(value).ok_or_else(bad)?);
            }
        }
        for records in [self.global, self.own] {
            for (_, name, value) in records.prefixed(XATTR) {
                found.insert(name.to_vec(), value.to_vec());
            }
        }
        Ok(found)
    }
}

impl Records {
    /// Records whose key begins with `prefix`: key, rest of the key, value.
    fn prefixed(&self, prefix: &'static [u8]) -> impl Iterator<Item = (&[u8], &[u8], &[u8])> {
        self.values
            .range(prefix.to_vec()..)
            .map_while(move |(key, value)| {
                Some((key.as_slice(), key.strip_prefix(prefix)?, value.as_slice()))
            })
    }
}

/// Unsigned decimal digits, nothing else.
pub(crate) fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |value, &byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// `-12.5` is half a second after -13: rounded down to the nanosecond, as times are.
fn time(text: &[u8]) -> Option<Timestamp> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let point = text
        .iter()
        .position(|&byte| byte == b'.')
        .unwrap_or(text.len());
    let (whole, fraction) = text.split_at(point);
    let fraction = fraction.get(1..).unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let sec = i64::try_from(if whole.is_empty() { 0 } else { decimal(whole)? }).ok()?;
    let digit = |at: usize| fraction.get(at).map_or(0, |&byte| u32::from(byte - b'0'));
    let nsec = (0..9).fold(0u32, |value, at| value * 10 + digit(at));
    if !negative {
        return Some(Timestamp { sec, nsec });
    }
    // What lies beyond nanoseconds pulls a negative time down by one.
    let beyond = fraction.iter().skip(9).any(|&byte| byte != b'0');
    let nanos = -(i128::from(sec) * 1_000_000_000 + i128::from(nsec) + i128::from(beyond));
    Some(Timestamp {
        sec: i64::try_from(nanos.div_euclid(1_000_000_000)).ok()?,
        nsec: u32::try_from(nanos.rem_euclid(1_000_000_000)).ok()?,
    })
}

fn percent_decode(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.iter();
    while let Some(&byte) = bytes.next() {
        if byte == b'%' {
            let high = char::from(*bytes.next()?).to_digit(16)?;
            let low = char::from(*bytes.next()?).to_digit(16)?;
            out.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            out.push(byte);
        }
    }
    Some(out)
}

/// Base64 with or without its padding, as libarchive writes it without.
fn base64_decode(text: &[u8]) -> Option<Vec<u8>> {
    let text = text.trim_ascii_end();
    let end = text
        .iter()
        .rposition(|&byte| byte != b'=')
        .map_or(0, |at| at + 1);
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut value) = (0u32, 0u32);
    for &byte in text.get(..end)? {
        let digit = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        value = ((value << 6) | u32::from(digit)) & 0xffff;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            out.push(u8::try_from((value >> bits) & 0xff).ok()?);
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_may_hold_anything_after_the_equals_sign() {
        let records = Records::parse(b"13 a=b=c\n\0\n\n\n6 b=c\n").unwrap();
        let records = Effective {
            own: &records,
            global: &Records::default(),
        };
        assert_eq!(records.get("a"), Some(&b"b=c\n\0\n\n"[..]));
        assert_eq!(records.get("b"), Some(&b"c"[..]));
    }

    #[test]
    fn broken_records_are_errors() {
        for data in [
            &b"5 a=b\n"[..],
            b"7 a=b\n",
            b"x a=b\n",
            b"6 ab=\n ",
            b"6 abc\n",
            b"999999999999999999999 a=b\n",
            b"1 \n",
            b"0 \n",
            b"6a=b\n",
        ] {
            assert!(Records::parse(data).is_err(), "{data:?}");
        }
    }

    #[test]
    fn an_empty_value_takes_a_record_back() {
        let global = Records::parse(b"9 uid=42\n").unwrap();
        let own = Records::parse(b"7 uid=\n").unwrap();
        assert_eq!(
            Effective {
                own: &own,
                global: &global
            }
            .id("uid"),
            Ok(None)
        );
        let own = Records::parse(b"").unwrap();
        assert_eq!(
            Effective {
                own: &own,
                global: &global
            }
            .id("uid"),
            Ok(Some(42))
        );
    }

    #[test]
    fn times() {
        let at = |sec, nsec| Some(Timestamp { sec, nsec });
        assert_eq!(time(b"0"), at(0, 0));
        assert_eq!(time(b"12.5"), at(12, 500_000_000));
        assert_eq!(time(b"12.0000000019"), at(12, 1));
        assert_eq!(time(b"-100"), at(-100, 0));
        assert_eq!(time(b"-12.5"), at(-13, 500_000_000));
        assert_eq!(time(b"-0.0000000001"), at(-1, 999_999_999));
        assert_eq!(time(b".5"), at(0, 500_000_000));
        assert_eq!(time(b"9223372036854775807"), at(i64::MAX, 0));
        for bad in [
            &b""[..],
            b"-",
            b".",
            b"1e5",
            b"1.5x",
            b"+5",
            b"9223372036854775808",
            b"--5",
        ] {
            assert_eq!(time(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn only_prefixed_records_are_xattrs() {
        let mut data = Vec::new();
        for (key, value) in [
            ("SCHILY.xattr.user.a", "1"),
            ("user.b", "2"),
            ("SCHILY.xattr.user.empty", ""),
            ("LIBARCHIVE.xattr.user.p%25", "AQID"),
            ("LIBARCHIVE.xattr.user.a", "AQID"),
        ] {
            let body = format!(" {key}={value}\n");
            data.extend_from_slice(format!("{}{body}", body.len() + 2).as_bytes());
        }
        let own = Records::parse(&data).unwrap();
        let xattrs = Effective {
            own: &own,
            global: &Records::default(),
        }
        .xattrs()
        .unwrap();
        let expected: Vec<(&[u8], &[u8])> = vec![
            (b"user.a", b"1"),
            (b"user.empty", b""),
            (b"user.p%", &[1, 2, 3]),
        ];
        assert_eq!(
            xattrs
                .iter()
                .map(|(k, v)| (k.as_slice(), v.as_slice()))
                .collect::<Vec<_>>(),
            expected
        );
    }
}
