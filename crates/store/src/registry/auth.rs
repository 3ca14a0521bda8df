//! Getting in: challenges (RFC 9110 section 11; the token flow of the distribution project), tokens
//! and when they end.
//!
//! Nothing is sent unasked: the first request is anonymous, the registry's challenge says how to
//! come back. Tokens are kept per intent (pull, push, delete) until shortly before they expire; one
//! that is refused earlier is fetched anew once. Fetching holds a lock, so that many threads ask
//! the token server once.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;

use super::credentials::Credential;

/// Life of a token whose server does not say it (the token specification's default).
const DEFAULT_LIFE: Duration = Duration::from_secs(60);
/// A token is renewed so long before its end, or a quarter of its life if that is shorter.
const MARGIN: Duration = Duration::from_secs(10);
/// Longest life that is believed: clocks stop in suspended machines.
const MAX_LIFE: Duration = Duration::from_secs(60 * 60);

/// What a request is about to do, which decides the rights of its token.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Intent {
    Pull,
    Push,
    Delete,
    /// Push, and pull from another repository of the host.
    Mount(String),
}

impl Intent {
    /// Scopes to ask the token server for, where the challenge names none; those of other
    /// repositories always.
    pub(super) fn scopes(&self, repository: &str, challenged: Option<&str>) -> Vec<String> {
        let actions = match self {
            Self::Pull => "pull",
            Self::Push | Self::Mount(_) => "pull,push",
            Self::Delete => "delete",
        };
        let mut scopes: Vec<String> = match challenged {
            Some(scope) if !scope.is_empty() => scope
                .split(' ')
                .filter(|s| !s.is_empty())
                .map(str::to_owned)
                .collect(),
            _ => vec![format!("repository:{repository}:{actions}")],
        };
        if let Self::Mount(other) = self {
            let other = format!("repository:{other}:pull");
            if !scopes.contains(&other) {
                scopes.push(other);
            }
        }
        scopes
    }
}

/// One challenge of a `WWW-Authenticate` header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Challenge {
    /// In lower case.
    pub scheme: String,
    /// Names in lower case.
    pub parameters: HashMap<String, String>,
}

/// Reads the challenges of one header. What does not follow the grammar ends the list.
pub(super) fn challenges(header: &str) -> Vec<Challenge> {
    let mut found: Vec<Challenge> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let (word, after) = token(rest);
        if word.is_empty() {
            return found;
        }
        let after = after.trim_start_matches([' ', '\t']);
        match (after.strip_prefix('='), found.last_mut()) {
            (Some(value), Some(challenge)) => {
                let Some((value, after)) = parameter(value.trim_start_matches([' ', '\t'])) else {
                    return found;
                };
                challenge
                    .parameters
                    .insert(word.to_ascii_lowercase(), value);
                rest = after;
            }
            (Some(_), None) => return found,
            (None, _) => {
                found.push(Challenge {
                    scheme: word.to_ascii_lowercase(),
                    parameters: HashMap::new(),
                });
                rest = after;
            }
        }
    }
}

fn token(text: &str) -> (&str, &str) {
    let end = text
        .find(|c: char| !(c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c)))
        .unwrap_or(text.len());
    text.split_at_checked(end).unwrap_or((text, ""))
}

/// A token or a quoted string, and what follows.
fn parameter(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let (value, rest) = token(text);
        return Some((value.to_owned(), rest));
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, quoted.get(at + 1..)?)),
            '\\' => value.push(chars.next()?.1),
            c => value.push(c),
        }
    }
    None
}

/// The header for a name and password.
pub(super) fn basic(user: &str, secret: &str) -> String {
    format!(
        "Basic {}",
        BASE64_STANDARD.encode(format!("{user}:{secret}"))
    )
}

/// A token server's answer.
#[derive(Deserialize)]
pub(super) struct TokenAnswer {
    #[serde(default)]
    token: Option<String>,
    #[serde(default)]
    access_token: Option<String>,
    #[serde(default)]
    expires_in: Option<u64>,
}

impl TokenAnswer {
    /// The header to send, and until when.
    pub(super) fn grant(self, asked: Instant) -> Option<Grant> {
        let token = self
            .token
            .filter(|token| !token.is_empty())
            .or(self.access_token)
            .filter(|token| !token.is_empty())?;
        let life = self
            .expires_in
            .map_or(DEFAULT_LIFE, Duration::from_secs)
            .min(MAX_LIFE);
        let margin = MARGIN.min(life / 4);
        Some(Grant {
            header: format!("Bearer {token}"),
            until: Some(asked + life.saturating_sub(margin)),
        })
    }
}

/// An `Authorization` header and its end.
#[derive(Clone)]
pub(super) struct Grant {
    pub header: String,
    /// `None`: as long as the process.
    pub until: Option<Instant>,
}

impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grant")
            .field("until", &self.until)
            .finish_non_exhaustive()
    }
}

/// What is known of getting in.
#[derive(Debug, Default)]
pub(super) struct Grants {
    state: Mutex<State>,
    /// Held while a token is fetched.
    fetching: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    grants: HashMap<Intent, Grant>,
    challenges: HashMap<Intent, Challenge>,
    /// Asked for once: helpers are slow.
    credential: Option<Option<Credential>>,
}

impl Grants {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // Facts, each whole: a panic elsewhere leaves none half written.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A header that should be good now.
    pub(super) fn fresh(&self, intent: &Intent) -> Option<String> {
        let state = self.state();
        let grant = state.grants.get(intent)?;
        let good = grant.until.is_none_or(|until| Instant::now() < until);
        good.then(|| grant.header.clone())
    }

    /// The challenge of an earlier answer, by which a token can be renewed before it is refused.
    pub(super) fn challenge(&self, intent: &Intent) -> Option<Challenge> {
        self.state().challenges.get(intent).cloned()
    }

    /// Gets a header by `fetch`, unless another thread has got a fresh one that is not `refused`.
    pub(super) fn obtain<E>(
        &self,
        intent: &Intent,
        challenge: &Challenge,
        refused: Option<&str>,
        fetch: impl FnOnce() -> Result<Grant, E>,
    ) -> Result<String, E> {
        let _one = self.fetching.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(header) = self.fresh(intent)
            && Some(header.as_str()) != refused
        {
            return Ok(header);
        }
        let grant = fetch()?;
        let header = grant.header.clone();
        let mut state = self.state();
        state.challenges.insert(intent.clone(), challenge.clone());
        state.grants.insert(intent.clone(), grant);
        Ok(header)
    }

    /// The credential, which `find` finds the first time.
    pub(super) fn credential<E>(
        &self,
        find: impl FnOnce() -> Result<Option<Credential>, E>,
    ) -> Result<Option<Credential>, E> {
        if let Some(known) = &self.state().credential {
            return Ok(known.clone());
        }
        let found = find()?;
        self.state().credential = Some(found.clone());
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read() {
        let found = challenges(
            r#"Bearer realm="https://a.example/t?x=1,2",service=s , Scope="repository:a/b:pull,push", Basic realm="say \"x\"""#,
        );
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].scheme, "bearer");
        assert_eq!(found[0].parameters["realm"], "https://a.example/t?x=1,2");
        assert_eq!(found[0].parameters["service"], "s");
        assert_eq!(found[0].parameters["scope"], "repository:a/b:pull,push");
        assert_eq!(found[1].scheme, "basic");
        assert_eq!(found[1].parameters["realm"], "say \"x\"");
        for (text, schemes) in [
            ("", 0),
            (",,", 0),
            ("=", 0),
            ("a=b", 0),
            ("Basic", 1),
            ("Negotiate abc", 2),
            ("Bearer realm=\"open", 1),
            ("Bearer realm=\"a\\", 1),
            ("Bearer \u{e4}", 1),
        ] {
            assert_eq!(challenges(text).len(), schemes, "{text:?}");
        }
    }

    #[test]
    fn tokens_end_before_their_time() {
        let now = Instant::now();
        let until = |json: &str| {
            let answer: TokenAnswer = serde_json::from_str(json).unwrap();
            answer.grant(now).map(|grant| grant.until.unwrap() - now)
        };
        let secs = |n| Some(Duration::from_secs(n));
        assert_eq!(until(r#"{"token":"t","expires_in":300}"#), secs(290));
        assert_eq!(until(r#"{"access_token":"t","expires_in":4}"#), secs(3));
        assert_eq!(until(r#"{"token":"t"}"#), secs(50));
        assert_eq!(
            until(r#"{"token":"t","expires_in":18446744073709551615}"#),
            secs(3590)
        );
        assert_eq!(until(r#"{"token":""}"#), None);
        assert_eq!(until("{}"), None);
    }

    #[test]
    fn scopes_are_the_challenges_or_our_own() {
        assert_eq!(Intent::Push.scopes("a", None), ["repository:a:pull,push"]);
        assert_eq!(Intent::Pull.scopes("a", Some("x:y:z q")), ["x:y:z", "q"]);
        assert_eq!(
            Intent::Mount("b".to_owned()).scopes("a", None),
            ["repository:a:pull,push", "repository:b:pull"]
        );
    }
}
