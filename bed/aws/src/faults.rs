//! Fault injection rules for AWS. The first rule that matches a call applies.

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};

use crate::{
    call::{Call, Service},
    capacity::Usage,
    errors,
};

/// The effect of a fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "effect", rename_all = "kebab-case")]
pub enum Effect {
    /// The service's own throttling error.
    Throttle,
    /// Any error code, in the service's own format; the status defaults to the documented one.
    Error {
        code: String,
        #[serde(default)]
        message: String,
        #[serde(default)]
        status: Option<u16>,
    },
    /// An internal error of the service: 500, 503, …
    ServerError { status: u16 },
    /// The call is executed, then the connection closes without a response.
    LostResponse,
    /// The call is executed after a delay.
    Delay { ms: u64 },
    /// The call is not executed and never answered.
    Hang,
    /// The call is not executed; the connection is reset.
    Reset,
    /// SQS: a receive returns nothing, even if there are messages.
    FalseEmpty,
    /// SQS: a receive returns messages in reverse order.
    Reorder,
    /// SQS, matched by message on `ReceiveMessage`: the next receive delivers it again, even if it is deleted by then.
    Duplicate,
    /// SQS, matched by message on `ReceiveMessage`: it is delivered only after a delay.
    Late { seconds: u32 },
    /// SQS, matched by message on `DeleteMessage`: it is deleted, but the next receive still delivers it.
    AfterDeletion,
    /// EC2: other calls do not see the instances of this launch, or the launch template or version that this call
    /// creates, for a while. Calls that name one of them are refused.
    Invisible { ms: u64 },
    /// DynamoDB: `BatchGetItem` and `BatchWriteItem` process only the first so many items.
    Unprocessed { processed: usize },
    /// EC2: `CreateFleet` finds capacity for so many machines of this usage class (of any, if omitted), and has the
    /// errors of an instant fleet for the rest. Limits of [`crate::capacity`] are for all fleets; this is for one.
    Short {
        available: u32,
        #[serde(default)]
        usage: Option<Usage>,
    },
    /// EC2: `CreateFleet` launches nothing and has this error for each override in its answer, which is no error itself.
    FleetError {
        code: String,
        #[serde(default)]
        message: String,
    },
    /// EC2: the answer of `CreateFleet` leaves out zone and subnet of the instances, as older services do.
    Older,
}

impl Effect {
    pub fn error(code: &str) -> Self {
        Self::Error { code: code.to_owned(), message: format!("The test bed was asked for {code}."), status: None }
    }

    /// The code that a test asks for.
    fn code(&self) -> Option<&str> {
        match self {
            Self::Error { code, .. } | Self::FleetError { code, .. } => Some(code),
            _ => None,
        }
    }

    /// Whether the effect applies to one message rather than one call.
    fn by_message(&self) -> bool {
        matches!(self, Self::Duplicate | Self::Late { .. } | Self::AfterDeletion)
    }
}

/// Which calls a fault applies to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    pub service: Service,
    /// Every action, if omitted.
    #[serde(default)]
    pub action: Option<String>,
    /// Text that the request (or the message, for effects on messages) must contain.
    #[serde(default)]
    pub contains: Option<String>,
    /// The number of matches to let pass first.
    #[serde(default)]
    pub skip: u32,
    /// The number of matches to affect after that; all, if omitted.
    #[serde(default)]
    pub times: Option<u32>,
    /// The probability that a match is affected.
    #[serde(default = "always")]
    pub probability: f64,
    /// Equal seeds affect the same matches.
    #[serde(default)]
    pub seed: u64,
    #[serde(flatten)]
    pub effect: Effect,
}

fn always() -> f64 {
    1.0
}

impl Rule {
    pub fn all(service: Service, effect: Effect) -> Self {
        Self { service, action: None, contains: None, skip: 0, times: None, probability: 1.0, seed: 0, effect }
    }

    pub fn on(service: Service, action: &str, effect: Effect) -> Self {
        Self { action: Some(action.to_owned()), ..Self::all(service, effect) }
    }

    pub fn containing(self, text: &str) -> Self {
        Self { contains: Some(text.to_owned()), ..self }
    }

    pub fn skip(self, skip: u32) -> Self {
        Self { skip, ..self }
    }

    pub fn times(self, times: u32) -> Self {
        Self { times: Some(times), ..self }
    }

    pub fn once(self) -> Self {
        self.times(1)
    }

    pub fn with_probability(self, probability: f64, seed: u64) -> Self {
        Self { probability, seed, ..self }
    }

    /// An error that the service does not have would test nothing.
    pub fn check(&self) -> Result<(), String> {
        let Some(code) = self.effect.code() else { return Ok(()) };
        let action = self.action.as_deref();
        match errors::row_of(self.service, action, code) {
            Some(_) => Ok(()),
            None => Err(format!(
                "{} {} has no error {code}: take one of bed/aws/src/errors.rs, or add it there with its source",
                self.service.name(),
                action.unwrap_or("as a whole")
            )),
        }
    }

    fn matches(&self, service: Service, action: &str, text: &str) -> bool {
        self.service == service
            && self.action.as_deref().is_none_or(|wanted| wanted == action)
            && self.contains.as_deref().is_none_or(|wanted| text.contains(wanted))
    }
}

/// An active rule.
#[derive(Clone, Debug, Serialize)]
pub struct Fault {
    pub id: u64,
    #[serde(flatten)]
    pub rule: Rule,
    /// Matching calls so far.
    pub seen: u32,
    /// How many of them were affected.
    pub hit: u32,
    #[serde(skip)]
    dice: StdRng,
}

impl Fault {
    fn hits(&mut self) -> bool {
        self.seen += 1;
        let hit = self.seen > self.rule.skip
            && self.rule.times.is_none_or(|times| self.hit < times)
            && (self.rule.probability >= 1.0 || self.dice.random::<f64>() < self.rule.probability);
        self.hit += u32::from(hit);
        hit
    }
}

/// The active rules, in the order in which they were added.
#[derive(Default)]
pub struct Faults {
    active: Vec<Fault>,
    last: u64,
}

impl Faults {
    pub fn add(&mut self, rule: Rule) -> u64 {
        self.last += 1;
        let dice = StdRng::seed_from_u64(rule.seed);
        self.active.push(Fault { id: self.last, rule, seen: 0, hit: 0, dice });
        self.last
    }

    pub fn remove(&mut self, id: u64) {
        self.active.retain(|fault| fault.id != id);
    }

    pub fn clear(&mut self) {
        self.active.clear();
    }

    pub fn list(&self) -> &[Fault] {
        &self.active
    }

    /// The effect on this call.
    pub fn on_call(&mut self, call: &Call) -> Option<Effect> {
        if self.active.is_empty() {
            return None;
        }
        self.decide(call.service, &call.action, &call.text(), false)
    }

    /// The effect on this message when `action` processes it.
    pub fn on_message(&mut self, action: &str, message: &str) -> Option<Effect> {
        self.decide(Service::Sqs, action, message, true)
    }

    fn decide(&mut self, service: Service, action: &str, text: &str, by_message: bool) -> Option<Effect> {
        let mut matching = self
            .active
            .iter_mut()
            .filter(|fault| fault.rule.effect.by_message() == by_message && fault.rule.matches(service, action, text));
        matching.find_map(|fault| fault.hits().then(|| fault.rule.effect.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(rule: Rule, calls: u32) -> Vec<u32> {
        let mut faults = Faults::default();
        faults.add(rule);
        (1..=calls).filter(|_| faults.decide(Service::Sqs, "SendMessage", "red apple", false).is_some()).collect()
    }

    #[test]
    fn a_rule_skips_then_hits_so_often() {
        let rule = Rule::on(Service::Sqs, "SendMessage", Effect::Throttle);
        assert_eq!(hits(rule.clone().skip(2).times(3), 9), [3, 4, 5]);
        assert_eq!(hits(rule.clone().containing("apple").once(), 9), [1]);
        assert!(hits(rule.containing("pear"), 9).is_empty());
        assert!(hits(Rule::all(Service::Ec2, Effect::Throttle), 9).is_empty());
        assert!(hits(Rule::on(Service::Sqs, "DeleteMessage", Effect::Throttle), 9).is_empty());
    }

    #[test]
    fn equal_seeds_hit_the_same_calls() {
        let rule = |seed| Rule::all(Service::Sqs, Effect::Hang).with_probability(0.3, seed);
        assert_eq!(hits(rule(7), 1000), hits(rule(7), 1000));
        assert_ne!(hits(rule(7), 1000), hits(rule(8), 1000));
        assert!((200..400).contains(&hits(rule(7), 1000).len()));
    }

    #[test]
    fn errors_that_a_service_does_not_have_are_refused() {
        let check = |service, action, code| Rule::on(service, action, Effect::error(code)).check();
        assert_eq!(check(Service::Ec2, "TerminateInstances", "UnauthorizedOperation"), Ok(()));
        let other = check(Service::Ec2, "TerminateInstances", "AccessDeniedException").unwrap_err();
        assert!(other.contains("ec2 TerminateInstances has no error AccessDeniedException"), "{other}");
        assert!(check(Service::Ec2, "DescribeSubnets", "InvalidFleetConfig").is_err());
        let all = Rule::all(Service::DynamoDb, Effect::error("ConditionalCheckFailedException"));
        assert!(all.check().is_err(), "not every operation has it");
    }

    #[test]
    fn a_rule_is_written_as_json() {
        let json = r#"{"service":"dynamodb","action":"PutItem","times":2,"effect":"delay","ms":50}"#;
        let rule: Rule = serde_json::from_str(json).unwrap();
        assert_eq!(rule, Rule::on(Service::DynamoDb, "PutItem", Effect::Delay { ms: 50 }).times(2));
    }
}
