//! Reads and decompresses an archive on a thread of its own, a bounded way ahead of its reader.

use std::io::{self, Read};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};

/// Bytes of one piece handed over.
const PIECE: usize = 256 << 10;
/// Pieces that may wait.
const DEPTH: usize = 16;

/// Calls `read` with the bytes of `input`, which are read ahead meanwhile. The thread is gone when
/// this returns, whatever `read` returned.
pub(crate) fn ahead<T>(mut input: Box<dyn Read + Send>, read: impl FnOnce(&mut Ahead) -> T) -> T {
    let (sender, receiver) = bounded(DEPTH);
    thread::scope(|scope| {
        scope.spawn(move || feed(&mut *input, &sender));
        // Dropped at the end of this block: a feeder that waits then finds nobody and ends.
        let mut ahead = Ahead {
            receiver,
            piece: Vec::new(),
            at: 0,
            over: false,
        };
        read(&mut ahead)
    })
}

fn feed(input: &mut dyn Read, sender: &Sender<io::Result<Vec<u8>>>) {
    loop {
        let mut piece = Vec::with_capacity(PIECE);
        let result = (&mut *input).take(PIECE as u64).read_to_end(&mut piece);
        let end = piece.is_empty();
        // What came before an error is still good.
        if !end && sender.send(Ok(piece)).is_err() {
            return;
        }
        match result {
            Err(error) => {
                let _ = sender.send(Err(error));
                return;
            }
            Ok(_) if end => return,
            Ok(_) => {}
        }
    }
}

/// The reading end.
pub(crate) struct Ahead {
    receiver: Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    at: usize,
    over: bool,
}

impl Read for Ahead {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut rest = self.piece.get(self.at..).unwrap_or_default();
            if !rest.is_empty() || out.is_empty() {
                let n = rest.read(out)?;
                self.at += n;
                return Ok(n);
            }
            if self.over {
                return Ok(0);
            }
            match self.receiver.recv() {
                Ok(Ok(piece)) => (self.piece, self.at) = (piece, 0),
                Ok(Err(error)) => {
                    self.over = true;
                    return Err(error);
                }
                Err(_) => self.over = true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Failing(u64);

    impl Read for Failing {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            if self.0 == 0 {
                return Err(io::Error::other("broken"));
            }
            let n = out.len().min(1000).min(usize::try_from(self.0).unwrap());
            out[..n].fill(7);
            self.0 -= n as u64;
            Ok(n)
        }
    }

    #[test]
    fn everything_before_an_error_comes_and_then_the_error() {
        let total = (PIECE * 3 + 5) as u64;
        ahead(Box::new(Failing(total)), |input| {
            let mut read = Vec::new();
            let error = input.read_to_end(&mut read).unwrap_err();
            assert_eq!(error.to_string(), "broken");
            assert_eq!(read.len() as u64, total);
        });
    }

    #[test]
    fn a_reader_that_gives_up_stops_the_thread() {
        let byte = ahead(Box::new(io::repeat(1)), |input| {
            let mut byte = [0];
            input.read_exact(&mut byte).unwrap();
            byte
        });
        assert_eq!(byte, [1]);
    }
}
