//! A bounded pool of threads for reads that have to wait.
//!
//! Threads start when work comes and none is idle, up to the limit, and end after a while
//! without work. When the limit is reached and the queue is full, the job is handed back: the
//! caller runs it itself and so stops taking in more requests, which then wait in the kernel.
//!
//! A job that waits for somebody who may not come soon says so ([`parked`]): its thread does not count
//! then, and another one takes on what is queued. So those who wait for a store that hangs do not keep
//! others waiting who need another store, or none.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};

/// Work for the pool. Must not panic across (a panic is caught, and the job's reply
/// answers EIO).
pub(crate) type Job = Box<dyn FnOnce() + Send>;

const IDLE: Duration = Duration::from_secs(10);
const STACK_BYTES: usize = 2 << 20;
/// Threads of one pool that do not count because they wait, at most. Each takes some pages of memory.
const MAX_PARKED: usize = 448;

thread_local! {
    /// The pool that the thread belongs to.
    static OWN: RefCell<Option<Arc<Shared>>> = const { RefCell::new(None) };
}

#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    name: String,
    max_threads: usize,
    max_queue: usize,
    state: Mutex<State>,
    work: Condvar,
    gone: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// Of `threads`, those that wait for somebody else.
    parked: usize,
    closed: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("queued", &self.queue.len())
            .field("threads", &self.threads)
            .field("idle", &self.idle)
            .field("parked", &self.parked)
            .field("closed", &self.closed)
            .finish()
    }
}

impl Pool {
    pub(crate) fn new(name: &str, max_threads: usize, max_queue: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                name: name.to_owned(),
                max_threads: max_threads.max(1),
                max_queue,
                state: Mutex::new(State::default()),
                work: Condvar::new(),
                gone: Condvar::new(),
            }),
        }
    }

    /// Queues a job. Gives it back when the pool is full or closed.
    pub(crate) fn submit(&self, job: Job) -> Result<(), Job> {
        let mut state = self.shared.state.lock();
        if state.closed {
            return Err(job);
        }
        if state.queue.len() < state.idle {
            state.queue.push_back(job);
            self.shared.work.notify_one();
            return Ok(());
        }
        if state.threads - state.parked < self.shared.max_threads {
            state.threads += 1;
            drop(state);
            let spawned = spawn(&self.shared);
            let mut state = self.shared.state.lock();
            if spawned.is_err() {
                state.threads -= 1;
                if state.threads == state.parked {
                    return Err(job);
                }
            }
            state.queue.push_back(job);
            self.shared.work.notify_one();
            return Ok(());
        }
        if state.queue.len() >= self.shared.max_queue {
            return Err(job);
        }
        state.queue.push_back(job);
        Ok(())
    }

    /// Jobs that run or wait for a thread.
    pub(crate) fn load(&self) -> usize {
        let state = self.shared.state.lock();
        (state.threads - state.idle).max(state.queue.len())
    }

    /// Waits until nothing is queued or at work, at most `limit`.
    pub(crate) fn wait_idle(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            let state = self.shared.state.lock();
            if state.queue.is_empty() && state.idle == state.threads {
                return true;
            }
            drop(state);
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Takes no more jobs and waits until every thread has ended or `limit` has passed.
    /// Queued jobs are dropped, which answers their requests with EIO.
    pub(crate) fn close(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut state = self.shared.state.lock();
        state.closed = true;
        let dropped = std::mem::take(&mut state.queue);
        drop(state);
        drop(dropped);
        self.shared.work.notify_all();
        let mut state = self.shared.state.lock();
        while state.threads > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.shared.gone.wait_timeout(state, left);
        }
        true
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.close(Duration::ZERO);
    }
}

fn spawn(shared: &Arc<Shared>) -> std::io::Result<()> {
    let own = Arc::clone(shared);
    std::thread::Builder::new()
        .name(shared.name.clone())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            OWN.set(Some(Arc::clone(&own)));
            run(&own);
        })
        .map(drop)
}

/// Waits for somebody else. If this is a thread of a pool, another one may work in its place
/// meanwhile.
pub(crate) fn parked<T>(wait: impl FnOnce() -> T) -> T {
    let _parked = Parked::new();
    wait()
}

/// Counts a thread in again however its wait ends.
struct Parked(Option<Arc<Shared>>);

impl Parked {
    fn new() -> Self {
        let Some(shared) = OWN.with_borrow(Clone::clone) else {
            return Self(None);
        };
        let mut state = shared.state.lock();
        if state.parked >= MAX_PARKED {
            drop(state);
            return Self(None);
        }
        state.parked += 1;
        let working = state.threads - state.parked;
        if state.idle == 0 && working < shared.max_threads && !state.queue.is_empty() {
            state.threads += 1;
            drop(state);
            if spawn(&shared).is_err() {
                // What is queued waits for the next thread that has time.
                shared.state.lock().threads -= 1;
            }
        } else {
            drop(state);
        }
        Self(Some(shared))
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        if let Some(shared) = &self.0 {
            shared.state.lock().parked -= 1;
        }
    }
}

fn run(shared: &Shared) {
    let mut state = shared.state.lock();
    loop {
        if let Some(job) = state.queue.pop_front() {
            drop(state);
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)).is_err() {
                tracing::error!(pool = %shared.name, "a read panicked; its reader got EIO");
            }
            state = shared.state.lock();
            continue;
        }
        if state.closed {
            break;
        }
        state.idle += 1;
        let since = Instant::now();
        state = shared.work.wait_timeout(state, IDLE);
        state.idle -= 1;
        if state.queue.is_empty() && since.elapsed() >= IDLE {
            break;
        }
    }
    state.threads -= 1;
    drop(state);
    shared.gone.notify_all();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::{AtomicU64, Ordering};

    #[test]
    fn runs_everything_and_hands_back_when_full() {
        let pool = Pool::new("test", 2, 1);
        let gate = Arc::new((Mutex::new(false), Condvar::new()));
        let done = Arc::new(AtomicU64::new(0));
        let blocked = |gate: &Arc<(Mutex<bool>, Condvar)>, done: &Arc<AtomicU64>| -> Job {
            let (gate, done) = (Arc::clone(gate), Arc::clone(done));
            Box::new(move || {
                let mut open = gate.0.lock();
                while !*open {
                    open = gate.1.wait(open);
                }
                done.fetch_add(1, Ordering::SeqCst);
            })
        };
        let mut handed_back = 0;
        for _ in 0..20 {
            if let Err(job) = pool.submit(blocked(&gate, &done)) {
                drop(job);
                handed_back += 1;
            }
        }
        // Two threads and one place in the queue; how many jobs the threads took out of the
        // queue before it filled up is up to the scheduler.
        assert!(
            (17..=18).contains(&handed_back) || handed_back == 16,
            "{handed_back}"
        );
        *gate.0.lock() = true;
        gate.1.notify_all();
        let end = Instant::now() + Duration::from_secs(60);
        while done.load(Ordering::SeqCst) < 20 - handed_back && Instant::now() < end {
            std::thread::yield_now();
        }
        assert_eq!(done.load(Ordering::SeqCst), 20 - handed_back);
        assert!(pool.close(Duration::from_secs(60)));
    }

    #[test]
    fn those_who_wait_keep_nobody_from_working() {
        let pool = Pool::new("test", 2, usize::MAX);
        let gate = Arc::new((Mutex::new(false), Condvar::new()));
        let (waiting, done) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let end = Instant::now() + Duration::from_secs(60);
        for round in 0..20 {
            let (gate, waiting, count) =
                (Arc::clone(&gate), Arc::clone(&waiting), Arc::clone(&done));
            let job: Job = Box::new(move || {
                if round % 2 == 0 {
                    count.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                parked(|| {
                    waiting.fetch_add(1, Ordering::SeqCst);
                    let mut open = gate.0.lock();
                    while !*open {
                        open = gate.1.wait(open);
                    }
                });
                count.fetch_add(1, Ordering::SeqCst);
            });
            assert!(pool.submit(job).is_ok());
        }
        while done.load(Ordering::SeqCst) < 10 || waiting.load(Ordering::SeqCst) < 10 {
            assert!(Instant::now() < end, "somebody is kept waiting");
            std::thread::yield_now();
        }
        assert_eq!(done.load(Ordering::SeqCst), 10);
        assert_eq!(pool.shared.state.lock().parked, 10);
        *gate.0.lock() = true;
        gate.1.notify_all();
        assert!(pool.wait_idle(Duration::from_secs(60)));
        assert_eq!(done.load(Ordering::SeqCst), 20);
        let state = pool.shared.state.lock();
        assert_eq!((state.parked, state.idle), (0, state.threads));
        drop(state);
        assert!(pool.close(Duration::from_secs(60)));
    }

    #[test]
    fn a_panic_costs_one_job_only() {
        let pool = Pool::new("test", 1, 100);
        let done = Arc::new(AtomicU64::new(0));
        for i in 0..10 {
            let done = Arc::clone(&done);
            let job: Job = Box::new(move || {
                assert!(i != 3, "on purpose");
                done.fetch_add(1, Ordering::SeqCst);
            });
            assert!(pool.submit(job).is_ok());
        }
        let end = Instant::now() + Duration::from_secs(60);
        while done.load(Ordering::SeqCst) < 9 && Instant::now() < end {
            std::thread::yield_now();
        }
        assert_eq!(done.load(Ordering::SeqCst), 9);
        assert!(pool.close(Duration::from_secs(60)));
    }
}
