//! gzip files of one or many members.

use std::io::{self, BufRead, Read};

use flate2::bufread::GzDecoder;

/// All members of a gzip file, one after the other.
pub(super) struct Gzip<R> {
    state: State<R>,
}

enum State<R> {
    Member(Box<GzDecoder<R>>),
    Done,
}

impl<R: BufRead> Gzip<R> {
    /// Decompresses `input`, which begins with a member.
    pub(super) fn new(input: R) -> Self {
        Self {
            state: State::Member(Box::new(GzDecoder::new(input))),
        }
    }
}

impl<R: BufRead> Read for Gzip<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            let State::Member(decoder) = &mut self.state else {
                return Ok(0);
            };
            let n = decoder.read(out)?;
            if n > 0 {
                return Ok(n);
            }
            let State::Member(decoder) = std::mem::replace(&mut self.state, State::Done) else {
                return Ok(0);
            };
            let mut input = decoder.into_inner();
            match input.fill_buf()?.first() {
                None => {}
                Some(0) => only_zeros(&mut input)?,
                Some(_) => self.state = State::Member(Box::new(GzDecoder::new(input))),
            }
        }
    }
}

fn only_zeros(input: &mut impl BufRead) -> io::Result<()> {
    loop {
        let bytes = input.fill_buf()?;
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.iter().any(|&byte| byte != 0) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "data that is not gzip follows the last member",
            ));
        }
        let n = bytes.len();
        input.consume(n);
    }
}
