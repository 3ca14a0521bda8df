//! Heads of HTTP messages, lists of extents, and streams that end in time.

use std::io::{self, BufRead, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::{MAX_ASKED, MAX_RANGES};

/// Longest head of a message in bytes.
const MAX_HEAD: u64 = 16 << 10;

/// Name of the header with a node's identity.
pub(super) const NODE: &str = "layerpack-node";
/// Name of the header with a list of extents.
pub(super) const EXTENTS: &str = "layerpack-extents";

/// A stream whose reads and writes fail once a time is reached, however little comes at a time.
#[derive(Debug)]
pub(super) struct Timed {
    pub(super) stream: TcpStream,
    pub(super) end: Instant,
}

impl Timed {
    fn left(&self) -> io::Result<std::time::Duration> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(left)
    }
}

fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    }
}

impl Read for Timed {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(buf).map_err(timed_out)
    }
}

impl Write for Timed {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(buf).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// What is wrong with a message.
pub(super) fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// First line and headers of a message.
#[derive(Debug, Default)]
pub(super) struct Head {
    pub(super) start: String,
    headers: Vec<(String, String)>,
}

impl Head {
    /// Reads a head; `None` if the stream ends before it.
    pub(super) fn read(stream: &mut impl BufRead) -> io::Result<Option<Self>> {
        let mut stream = stream.take(MAX_HEAD);
        let mut head = Self::default();
        let mut line = Vec::new();
        for number in 0.. {
            line.clear();
            stream.read_until(b'\n', &mut line)?;
            if line.is_empty() && number == 0 {
                return Ok(None);
            }
            if line.last() != Some(&b'\n') {
                return Err(wrong("the head of a message is cut off or too long"));
            }
            let text = std::str::from_utf8(&line)
                .map_err(|_| wrong("the head of a message is not text"))?
                .trim_end();
            if number == 0 {
                head.start = text.to_owned();
            } else if text.is_empty() {
                break;
            } else {
                let (name, value) = text
                    .split_once(':')
                    .ok_or_else(|| wrong("a header has no value"))?;
                let pair = (name.trim().to_ascii_lowercase(), value.trim().to_owned());
                head.headers.push(pair);
            }
        }
        Ok(Some(head))
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Bytes of the body; what says it otherwise is refused.
    pub(super) fn body_len(&self) -> io::Result<u64> {
        if self.get("transfer-encoding").is_some() {
            return Err(wrong("a message in pieces is not understood"));
        }
        match self.get("content-length") {
            None => Ok(0),
            Some(text) => text
                .parse()
                .map_err(|_| wrong("the length of a message is no number")),
        }
    }

    pub(super) fn closes(&self) -> bool {
        self.get("connection")
            .is_some_and(|value| value.eq_ignore_ascii_case("close"))
    }
}

/// Ascending numbers as ranges, such as `0-14,17`.
pub(super) fn ranges(numbers: &[u32]) -> String {
    let mut text = String::new();
    let mut rest = numbers;
    while let Some(first) = rest.first() {
        let run = rest
            .iter()
            .zip(u64::from(*first)..)
            .take_while(|(number, expected)| u64::from(**number) == *expected)
            .count();
        let (this, others) = rest.split_at(run.max(1));
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(&first.to_string());
        if let Some(last) = this.last().filter(|last| *last != first) {
            text.push_str(&format!("-{last}"));
        }
        rest = others;
    }
    text
}

/// The numbers of such ranges, ascending; an error for anything else.
pub(super) fn numbers(text: &str) -> io::Result<Vec<u32>> {
    let mut numbers: Vec<u32> = Vec::new();
    for (at, range) in text.split(',').filter(|r| !r.is_empty()).enumerate() {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let parsed = first.parse::<u32>().ok().zip(last.parse::<u32>().ok());
        let (first, last) = parsed
            .filter(|(first, last)| first <= last)
            .ok_or_else(|| wrong("a range of extents is no range"))?;
        if numbers.last().is_some_and(|before| *before >= first) {
            return Err(wrong("ranges of extents do not ascend"));
        }
        let many = usize::try_from(last - first).unwrap_or(usize::MAX);
        if at >= MAX_RANGES || many >= MAX_ASKED - numbers.len().min(MAX_ASKED) {
            return Err(wrong("more extents than one request may name"));
        }
        numbers.extend(first..=last);
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_extents_come_back() {
        for (list, text) in [
            (vec![], ""),
            (vec![7], "7"),
            (vec![0, 1, 2, 9, u32::MAX], "0-2,9,4294967295"),
            (vec![u32::MAX - 1, u32::MAX], "4294967294-4294967295"),
        ] {
            assert_eq!(ranges(&list), text);
            assert_eq!(numbers(text).unwrap(), list);
        }
        for text in [
            "x",
            "2-1",
            "1,1",
            "5,3",
            "0-4096",
            "0-4000,5000-5200",
            "-",
            "1-2-3",
        ] {
            assert!(numbers(text).is_err(), "{text}");
        }
        assert_eq!(numbers("0-4095").unwrap().len(), MAX_ASKED);
    }

    #[test]
    fn heads_are_bounded_and_whole() {
        let read = |bytes: &[u8]| Head::read(&mut io::Cursor::new(bytes.to_vec()));
        let head = read(b"GET / HTTP/1.1\r\nA: b\r\nContent-Length: 5\r\n\r\nhello")
            .unwrap()
            .unwrap();
        assert_eq!(head.start, "GET / HTTP/1.1");
        assert_eq!((head.get("a"), head.body_len().unwrap()), (Some("b"), 5));
        assert!(read(b"").unwrap().is_none());
        let long = [b"GET / HTTP/1.1\r\n".to_vec(), vec![b'x'; 20_000]].concat();
        for bytes in [
            b"GET / HTTP/1.1\r\n".to_vec(),
            b"GET".to_vec(),
            b"G\r\nno colon\r\n\r\n".to_vec(),
            b"\xff\n\n".to_vec(),
            long,
        ] {
            assert!(read(&bytes).is_err());
        }
        let pieces = read(b"G\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
        assert!(pieces.unwrap().body_len().is_err());
    }
}
