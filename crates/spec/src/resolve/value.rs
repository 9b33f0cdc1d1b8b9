//! Whether a value obeys a rule, and its one normal form.

use serde_json::{Value, json};

use crate::amount;
use crate::settings::Rule;

/// The value in its normal form, or what was found instead.
pub fn check(rule: Rule, raw: &Value) -> Result<Value, String> {
    let found = || describe(raw);
    match rule {
        Rule::Text => text(raw).filter(|t| !t.is_empty()).map(|t| json!(t)).ok_or_else(found),
        Rule::Name => raw.as_str().filter(|t| is_name(t)).map(|t| json!(t)).ok_or_else(found),
        Rule::OneOf(names) => raw.as_str().filter(|t| names.contains(t)).map(|t| json!(t)).ok_or_else(found),
        Rule::Flag => raw.as_bool().map(|b| json!(b)).ok_or_else(found),
        Rule::Count { min, max } => {
            whole(raw).filter(|n| (min..=max).contains(n)).map(|n| json!(n)).ok_or_else(found)
        }
        Rule::Counts => {
            let items = raw.as_array().ok_or_else(found)?;
            let one = |v: &Value| whole(v).filter(|n| *n >= 1).map(|n| json!(n)).ok_or_else(|| describe(v));
            items.iter().map(one).collect::<Result<Vec<_>, _>>().map(Value::Array)
        }
        Rule::Positive => number(raw).filter(|x| *x > 0.0).map(|x| json!(x)).ok_or_else(found),
        Rule::NotNegative => number(raw).filter(|x| *x >= 0.0).map(|x| json!(x)).ok_or_else(found),
        Rule::Fraction => number(raw).filter(|x| (0.0..1.0).contains(x)).map(|x| json!(x)).ok_or_else(found),
        Rule::Duration => raw
            .as_str()
            .filter(|t| humantime::parse_duration(t).is_ok_and(|d| !d.is_zero()))
            .map(|t| json!(t))
            .ok_or_else(found),
        Rule::Character => raw
            .as_str()
            .filter(|t| t.len() == 1 && !"\"\r\n".contains(*t))
            .map(|t| json!(t))
            .ok_or_else(found),
        Rule::Texts => match raw {
            Value::Array(items) => {
                let one = |v: &Value| text(v).map(|t| json!(t)).ok_or_else(|| describe(v));
                items.iter().map(one).collect::<Result<Vec<_>, _>>().map(Value::Array)
            }
            other => text(other).filter(|t| !t.is_empty()).map(|t| json!([t])).ok_or_else(found),
        },
        Rule::Amount => {
            let amount = text(raw).filter(|t| amount::parse(t).is_some_and(|n| n > 0));
            amount.map(|t| json!(t)).ok_or_else(found)
        }
        Rule::Memory => {
            let memory = text(raw).filter(|t| amount::whole(t).is_some_and(|n| n > 0));
            memory.map(|t| json!(t)).ok_or_else(found)
        }
        Rule::Priority => match raw.as_str() {
            Some(name @ ("low" | "high")) => Ok(json!(name)),
            _ => number(raw).filter(|x| (0.0..=1.0).contains(x)).map(|x| json!(x)).ok_or_else(found),
        },
        Rule::Pairs => {
            let pairs = raw.as_object().ok_or_else(found)?.iter();
            let one = |(key, v): (&String, &Value)| match text(v) {
                Some(t) => Ok((key.clone(), json!(t))),
                None => Err(format!("{} for {key}", describe(v))),
            };
            pairs.map(one).collect::<Result<_, _>>().map(Value::Object)
        }
        Rule::Tally => {
            let pairs = raw.as_object().ok_or_else(found)?.iter();
            let one = |(key, v): (&String, &Value)| match whole(v).filter(|n| *n >= 1) {
                Some(n) if is_name(key) => Ok((key.clone(), json!(n))),
                Some(_) => Err(format!("the name {key:?}")),
                None => Err(format!("{} for {key}", describe(v))),
            };
            pairs.map(one).collect::<Result<_, _>>().map(Value::Object)
        }
        Rule::Mapping => raw.is_object().then(|| raw.clone()).ok_or_else(found),
        Rule::Mappings => {
            let items = raw.as_array().ok_or_else(found)?;
            let wrong = items.iter().find(|item| !item.is_object());
            wrong.map_or_else(|| Ok(raw.clone()), |item| Err(describe(item)))
        }
    }
}

/// A value in a message.
pub fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing".into(),
        Value::Object(_) => "a mapping".into(),
        other => other.to_string(),
    }
}

/// Text, or a scalar that YAML took for something else (`positive: [1]`).
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(s) => Some(s.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

fn whole(value: &Value) -> Option<u64> {
    let float = || value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..9e15).contains(x)).map(|x| x as u64);
    value.as_u64().or_else(float)
}

/// A finite number; YAML 1.2 does not know `1e-8` without a dot, so text that is a number counts too.
fn number(value: &Value) -> Option<f64> {
    let parsed = || value.as_str().and_then(|t| t.parse::<f64>().ok());
    value.as_f64().or_else(parsed).filter(|x| x.is_finite())
}

fn is_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    text.len() <= 50 && text.bytes().all(inner) && edge(text.bytes().next()) && edge(text.bytes().last())
}
