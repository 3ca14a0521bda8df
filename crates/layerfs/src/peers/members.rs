//! Which peers there are, how they are, and which is the home of what.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use layerpack_store::peer::{PeerClient, PeerError, PeerSource, PeerToken};
use layerpack_store::{Hasher, LayerId};

use super::{PeerInfo, PeerMeter, PeerStatus, PeersConfig, REFUSED};
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering, RwLock};

/// Bytes of a layer's data that have one home.
pub(crate) const PART: u64 = 2 << 20;
/// Requests to one peer at once, at most: a peer that hangs must not take all fetching threads.
const AT_ONCE: u64 = 4;
/// Between two rounds of looking after peers.
const ROUND: Duration = Duration::from_millis(500);
/// Between two looks at what names stand for.
const RESOLVE: Duration = Duration::from_secs(30);
/// Longest wait for a peer to say who it is.
const HELLO: Duration = Duration::from_millis(500);
/// Shortest and longest time that a peer is put aside for.
const ASIDE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));
/// The longest for one that does not answer at all: it may just be starting.
const ABSENT: Duration = Duration::from_secs(8);
/// How long a peer that does not serve a layer is not asked for it.
const LACKS: Duration = Duration::from_secs(1);
/// Layers that are remembered so.
const MAX_LACKED: usize = 4096;
/// Most peers.
const MAX_MEMBERS: usize = 1024;

#[derive(Debug, Default)]
struct State {
    node: Option<String>,
    /// Failures in a row.
    failures: u32,
    /// It did not take the token when it was asked last.
    refused: bool,
    aside: Option<Instant>,
    lacks: HashMap<LayerId, Instant>,
}

/// A peer.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) client: PeerClient,
    asking: AtomicU64,
    state: Mutex<State>,
}

/// A place among those who ask a peer; free on drop.
pub(crate) struct Slot<'a>(&'a Member);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.asking.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Member {
    fn new(address: SocketAddr, token: Option<PeerToken>) -> Arc<Self> {
        Arc::new(Self {
            client: PeerClient::new(address, token),
            asking: AtomicU64::new(0),
            state: Mutex::new(State::default()),
        })
    }

    /// A place to ask it, if there is one.
    pub(crate) fn slot(&self) -> Option<Slot<'_>> {
        let free = |n: u64| (n < AT_ONCE).then(|| n + 1);
        let taken = self
            .asking
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, free);
        taken.is_ok().then(|| Slot(self))
    }

    /// It does not serve this layer, for now.
    pub(crate) fn lacks(&self, layer: &LayerId) {
        let mut state = self.state.lock();
        if state.lacks.len() >= MAX_LACKED {
            state.lacks.clear();
        }
        state.lacks.insert(*layer, Instant::now());
    }

    /// It is not asked for a while, the longer the more often this happens in a row.
    pub(crate) fn put_aside(&self) {
        self.put_aside_up_to(ASIDE.1);
    }

    fn put_aside_up_to(&self, longest: Duration) {
        let mut state = self.state.lock();
        let (shortest, _) = ASIDE;
        let pause = shortest.saturating_mul(1 << state.failures.min(10));
        state.failures = state.failures.saturating_add(1);
        state.aside = Some(Instant::now() + pause.min(longest));
    }

    /// It gave what was asked for.
    pub(crate) fn is_good(&self) {
        self.state.lock().failures = 0;
    }

    /// Whether its answer was that the token is wrong.
    pub(crate) fn note_refused(&self, refused: bool) {
        self.state.lock().refused = refused;
    }

    /// Its identity, if it may be asked, for this layer if one is given.
    fn usable(&self, layer: Option<&LayerId>) -> Option<String> {
        let state = self.state.lock();
        if state.aside.is_some() {
            return None;
        }
        let lacked = layer.and_then(|layer| state.lacks.get(layer));
        if lacked.is_some_and(|at| at.elapsed() < LACKS) {
            return None;
        }
        state.node.clone()
    }

    /// Asks it who it is if that is not known, or it was put aside long enough.
    fn look_after(&self, meter: &PeerMeter) {
        {
            let state = self.state.lock();
            let due = match state.aside {
                Some(until) => Instant::now() >= until,
                None => state.node.is_none(),
            };
            if !due {
                return;
            }
        }
        match self.client.node(HELLO) {
            Ok(node) => {
                let mut state = self.state.lock();
                state.node = Some(node);
                state.aside = None;
                state.refused = false;
            }
            Err(error) => {
                let refused = matches!(error, PeerError::Refused);
                if refused {
                    meter.fail(REFUSED);
                    if !self.state.lock().refused {
                        tracing::warn!(peer = %self.client.address(),
                            "the peer refuses this node's token: give all peers the same");
                    }
                }
                self.note_refused(refused);
                tracing::debug!(peer = %self.client.address(), error = %error, "no answer");
                self.put_aside_up_to(ABSENT);
            }
        }
    }
}

/// The peers of a node.
#[derive(Debug)]
pub(crate) struct Peers {
    /// This node's identity, if others can ask it.
    own: Option<String>,
    /// This node's identity.
    name: String,
    pub(crate) patience: Duration,
    sources: Vec<PeerSource>,
    token: Option<PeerToken>,
    members: RwLock<Vec<Arc<Member>>>,
    pub(crate) meter: Arc<PeerMeter>,
    end: Arc<(Mutex<bool>, Condvar)>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Peers {
    pub(super) fn start(config: &PeersConfig, own: &str) -> std::io::Result<Arc<Self>> {
        let peers = Arc::new(Self {
            own: config.listen.map(|_| own.to_owned()),
            name: own.to_owned(),
            patience: config.patience,
            sources: config.sources.clone(),
            token: config.token.clone(),
            members: RwLock::new(Vec::new()),
            meter: Arc::default(),
            end: Arc::default(),
            thread: Mutex::new(None),
        });
        if peers.sources.is_empty() {
            return Ok(peers);
        }
        let (end, watched) = (Arc::clone(&peers.end), Arc::downgrade(&peers));
        let thread = std::thread::Builder::new()
            .name("peer-watch".to_owned())
            .stack_size(512 << 10)
            .spawn(move || {
                let mut resolved: Option<Instant> = None;
                loop {
                    let Some(peers) = watched.upgrade() else {
                        return;
                    };
                    if resolved.is_none_or(|at| at.elapsed() >= RESOLVE) {
                        // A name that cannot be resolved is tried again soon.
                        resolved = peers.resolve().then(Instant::now);
                    }
                    let members = peers.members.read().clone();
                    let meter = Arc::clone(&peers.meter);
                    drop(peers);
                    for member in &members {
                        if *end.0.lock() {
                            return;
                        }
                        member.look_after(&meter);
                    }
                    let ended = end.0.lock();
                    if *ended || *end.1.wait_timeout(ended, ROUND) {
                        return;
                    }
                }
            })?;
        *peers.thread.lock() = Some(thread);
        Ok(peers)
    }

    /// Looks what the sources stand for now. Whether all could be resolved.
    fn resolve(&self) -> bool {
        let mut addresses: Vec<SocketAddr> = Vec::new();
        let mut all = true;
        for source in &self.sources {
            match source.resolve() {
                Ok(found) => addresses.extend(found),
                Err(error) => {
                    all = false;
                    tracing::warn!(peers = %source, %error, "no address of peers");
                }
            }
        }
        addresses.sort();
        addresses.dedup();
        addresses.truncate(MAX_MEMBERS);
        let mut members = self.members.write();
        let keep = |m: &Arc<Member>| !all || addresses.contains(&m.client.address());
        members.retain(keep);
        for address in addresses {
            if !members.iter().any(|m| m.client.address() == address) {
                members.push(Member::new(address, self.token.clone()));
            }
        }
        all
    }

    /// The home of a part of a layer's data; `None`: this node, or nobody.
    pub(crate) fn home(&self, layer: &LayerId, part: u64) -> Option<Arc<Member>> {
        let members = self.members.read();
        let others = members.iter().filter_map(|member| {
            let node = member.usable(Some(layer))?;
            // A list may hold its reader.
            (node != self.name).then(|| (score(&node, layer, part), node, Some(member)))
        });
        let own = self
            .own
            .iter()
            .map(|own| (score(own, layer, part), own.clone(), None));
        let (_, _, home) = others
            .chain(own)
            .max_by(|(a, m, _), (b, n, _)| (a, m).cmp(&(b, n)))?;
        home.map(Arc::clone)
    }

    pub(super) fn status(&self) -> PeerStatus {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let meter = &self.meter;
        PeerStatus {
            members: self.list().iter().filter(|peer| peer.used).count() as u64,
            requests: get(&meter.asked),
            received: get(&meter.received),
            failures: std::array::from_fn(|i| meter.failures.get(i).map_or(0, get)),
            served_requests: get(&meter.served_requests),
            served: get(&meter.served),
        }
    }

    pub(super) fn list(&self) -> Vec<PeerInfo> {
        let members = self.members.read().clone();
        members
            .iter()
            .map(|member| {
                let node = member.usable(None);
                let state = member.state.lock();
                PeerInfo {
                    address: member.client.address(),
                    node: state.node.clone(),
                    used: node.is_some_and(|node| node != self.name),
                    failures: state.failures,
                    refused: state.refused,
                }
            })
            .collect()
    }

    /// Ends the thread that looks after peers.
    pub(super) fn close(&self) {
        *self.end.0.lock() = true;
        self.end.1.notify_all();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// How much a node is the home of a part: the highest is.
fn score(node: &str, layer: &LayerId, part: u64) -> u64 {
    let mut hasher = Hasher::new();
    hasher.update(node.as_bytes());
    hasher.update(b"\0");
    hasher.update(layer.digest().as_bytes());
    hasher.update(&part.to_le_bytes());
    let digest = hasher.finish();
    let first = digest.as_bytes().first_chunk::<8>();
    first.map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use layerpack_store::Digest;

    fn peers(own: &str, others: &[&str]) -> Arc<Peers> {
        let config = PeersConfig {
            listen: Some("127.0.0.1:0".parse().unwrap()),
            ..PeersConfig::default()
        };
        let peers = Peers::start(&config, own).unwrap();
        for (port, other) in (1000..).zip(others) {
            let member = Member::new(SocketAddr::from(([127, 0, 0, 1], port)), None);
            member.state.lock().node = Some((*other).to_owned());
            peers.members.write().push(member);
        }
        peers
    }

    fn home_of(peers: &Peers, layer: &LayerId, part: u64) -> String {
        match peers.home(layer, part) {
            None => peers.name.clone(),
            Some(member) => member.state.lock().node.clone().unwrap(),
        }
    }

    #[test]
    fn all_nodes_agree_on_homes_and_share_the_work() {
        let names = ["a", "b", "c", "d"];
        // Each knows the others in another order, and itself too.
        let nodes: Vec<_> = (0..4)
            .map(|i| {
                let mut list = names;
                list.rotate_left(i);
                peers(names[i], &list)
            })
            .collect();
        let layer = LayerId::from_digest(Digest::of(b"layer"));
        let mut shares = HashMap::new();
        for part in 0..400 {
            let home = home_of(&nodes[0], &layer, part);
            for node in &nodes {
                assert_eq!(home_of(node, &layer, part), home);
            }
            *shares.entry(home).or_insert(0) += 1;
        }
        assert_eq!(shares.len(), 4);
        assert!(shares.values().all(|n| (60..140).contains(n)), "{shares:?}");
        // One that is put aside, or lacks the layer, leaves its parts to the others; theirs stay.
        let before: Vec<_> = (0..400).map(|p| home_of(&nodes[0], &layer, p)).collect();
        let member = |name: &str| {
            let members = nodes[0].members.read().clone();
            let named = |m: &&Arc<Member>| m.state.lock().node.as_deref() == Some(name);
            Arc::clone(members.iter().find(named).unwrap())
        };
        member("b").put_aside();
        member("c").lacks(&layer);
        for (part, was) in (0..400).zip(before) {
            let now = home_of(&nodes[0], &layer, part);
            assert!(now != "b" && now != "c");
            assert!(was == now || was == "b" || was == "c");
        }
        assert_eq!(nodes[0].status().members, 2, "c serves other layers");
    }

    #[test]
    fn few_ask_one_peer_at_once() {
        let member = Member::new(SocketAddr::from(([127, 0, 0, 1], 9)), None);
        let slots: Vec<_> = std::iter::from_fn(|| member.slot()).take(100).collect();
        assert_eq!(slots.len() as u64, AT_ONCE);
        drop(slots);
        assert!(member.slot().is_some());
    }
}
