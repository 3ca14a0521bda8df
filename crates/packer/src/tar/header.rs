//! One 512-byte tar header: checksum, fields, numbers.
//!
//! Understands V7, POSIX ustar, GNU and star headers. Numbers are octal, or base-256 two's
//! complement where the first byte has its top bit set (GNU, star).

/// Size of a header, and what everything in an archive is padded to.
pub(crate) const BLOCK: usize = 512;

/// A block of the archive that may be a header.
#[derive(Debug, Clone)]
pub(crate) struct Header {
    bytes: [u8; BLOCK],
}

/// Why a field cannot be.
pub(crate) type FieldError = String;

impl Header {
    /// Takes a block as a header if its checksum says so.
    ///
    /// Some old writers summed signed bytes; both sums are accepted, as in every reader.
    pub(crate) fn new(bytes: [u8; BLOCK]) -> Result<Self, FieldError> {
        let header = Self { bytes };
        let stored = header.number(148, 8, "checksum")?;
        let (mut unsigned, mut signed) = (0u32, 0i32);
        for (at, &byte) in header.bytes.iter().enumerate() {
            let byte = if (148..156).contains(&at) { b' ' } else { byte };
            unsigned += u32::from(byte);
            signed += i32::from(byte.cast_signed());
        }
        let (unsigned, signed) = (i128::from(unsigned), i128::from(signed));
        if stored == unsigned || stored == signed {
            Ok(header)
        } else {
            Err(format!("header checksum {stored} is not {unsigned}"))
        }
    }

    /// Takes a block of another kind, for its fields.
    pub(crate) fn unchecked(bytes: [u8; BLOCK]) -> Self {
        Self { bytes }
    }

    /// All of the block, for fields that only some formats have.
    pub(crate) fn field(&self, at: usize, len: usize) -> &[u8] {
        self.bytes.get(at..at + len).unwrap_or_default()
    }

    /// A text field up to its NUL, if it has one.
    pub(crate) fn text(&self, at: usize, len: usize) -> &[u8] {
        let field = self.field(at, len);
        field.split(|&byte| byte == 0).next().unwrap_or_default()
    }

    /// A numeric field.
    pub(crate) fn number(&self, at: usize, len: usize, what: &str) -> Result<i128, FieldError> {
        number(self.field(at, len)).ok_or_else(|| {
            format!(
                "{what} field {:?} is not a number",
                crate::show(self.field(at, len))
            )
        })
    }

    /// A numeric field that cannot be negative.
    pub(crate) fn unsigned(&self, at: usize, len: usize, what: &str) -> Result<u64, FieldError> {
        let value = self.number(at, len, what)?;
        u64::try_from(value).map_err(|_| format!("{what} {value} is out of range"))
    }

    /// A numeric field of at most 32 bits.
    pub(crate) fn id(&self, at: usize, len: usize, what: &str) -> Result<u32, FieldError> {
        let value = self.number(at, len, what)?;
        // Old writers put ids as negative 32-bit numbers.
        u32::try_from(value)
            .ok()
            .or_else(|| i32::try_from(value).ok().map(i32::cast_unsigned))
            .ok_or_else(|| format!("{what} {value} does not fit 32 bits"))
    }

    /// The member's type; V7 archives have NUL for files.
    pub(crate) fn kind(&self) -> u8 {
        self.bytes.get(156).copied().unwrap_or_default()
    }

    /// The member's name, with the prefix of POSIX headers.
    pub(crate) fn name(&self) -> Vec<u8> {
        let name = self.text(0, 100);
        let prefix = if self.field(257, 6) != b"ustar\0" {
            // GNU and V7 headers use those bytes otherwise, or not at all.
            &[]
        } else if self.field(508, 4) == b"tar\0" {
            // star: times follow a shorter prefix.
            self.text(345, 131)
        } else {
            self.text(345, 155)
        };
        if prefix.is_empty() {
            name.to_vec()
        } else {
            [prefix, b"/", name].concat()
        }
    }

    /// True if device numbers are there to be read: V7 headers end before them.
    pub(crate) fn has_devices(&self) -> bool {
        self.field(257, 5) == b"ustar"
    }
}

/// A number in octal digits, with spaces before and spaces or NULs after, or in base-256. An
/// empty field is 0, as every reader takes it.
pub(crate) fn number(field: &[u8]) -> Option<i128> {
    let (&first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        // Bit 6 is the sign; what is more than 8 bytes wide must be its extension.
        let mut value = if first & 0x40 != 0 { -1i128 } else { 0 };
        value = (value << 6) | i128::from(first & 0x3f);
        for &byte in rest {
            value = (value << 8) | i128::from(byte);
        }
        return Some(value);
    }
    let digits = field.trim_ascii_start();
    let end = digits
        .iter()
        .position(|byte| !byte.is_ascii_digit())
        .unwrap_or(digits.len());
    let (digits, tail) = digits.split_at(end);
    // After the digits only an end mark; whatever follows a NUL is not part of the field.
    if !matches!(tail.first(), None | Some(0 | b' ')) {
        return None;
    }
    let mut value = 0i128;
    for &digit in digits {
        if digit > b'7' {
            return None;
        }
        value = value * 8 + i128::from(digit - b'0');
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_octal() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"77777777"), Some(0o7777_7777));
        assert_eq!(number(b"\0\0\0\0"), Some(0));
        assert_eq!(number(b"        "), Some(0));
        assert_eq!(number(b"644\0junk"), Some(0o644));
        assert_eq!(number(b"648\0"), None);
        assert_eq!(number(b"-644\0"), None);
        assert_eq!(number(b"0x1f\0"), None);
        assert_eq!(number(b""), None);
    }

    #[test]
    fn numbers_in_base_256() {
        assert_eq!(number(&[0x80, 0, 0, 1]), Some(1));
        assert_eq!(number(&[0xff; 12]), Some(-1));
        let mut field = [0xff; 12];
        field[11] = 0x9c;
        assert_eq!(number(&field), Some(-100));
        assert_eq!(
            number(&[0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]),
            Some(0xffff_ffff)
        );
        let mut widest = [0xff; 12];
        widest[0] = 0xbf;
        assert_eq!(number(&widest), Some((1 << 94) - 1));
    }
}
