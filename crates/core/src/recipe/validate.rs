//! A bad recipe fails when it is read, not at step 4,000.

use super::{From, Kind, Recipe, Section, Site};
use crate::ops::CONVERSIONS;
use crate::{Error, Result};
use nibble_formats::{BlockAxis, Format, Rounding, ScaleRule};

pub(super) fn validate(recipe: &Recipe) -> Result<()> {
    for kind in Kind::ALL {
        section(recipe, kind, recipe.of(kind))?;
    }
    // Every override by itself must leave something the kernels can follow.
    for o in &recipe.overrides {
        for kind in Kind::ALL {
            let name = o.layers.replace(['*', '?'], "x");
            section(recipe, kind, &recipe.section(kind, &name, o.steps.0))?;
        }
    }
    Ok(())
}

struct Check<'a> {
    recipe: &'a Recipe,
    kind: Kind,
}

impl Check<'_> {
    fn fail<T>(&self, site: Site, why: impl ToString) -> Result<T> {
        Err(Error::Recipe {
            recipe: self.recipe.name.clone(),
            key: format!("{}.{}", self.kind.name(), site.key()),
            why: why.to_string(),
        })
    }

    fn expect(&self, site: Site, ok: bool, why: &str) -> Result<()> {
        if ok { Ok(()) } else { self.fail(site, why) }
    }
}

pub(super) fn section(recipe: &Recipe, kind: Kind, s: &Section) -> Result<()> {
    let check = Check { recipe, kind };
    for site in kind.sites() {
        let p = s.at(site);
        if p.rht.is_some() {
            check.fail::<()>(site, "no product applies a Hadamard transform yet")?;
        }
        let gradient = matches!(site, Site::DgradDy | Site::WgradDy | Site::DispatchBwd);
        let random = matches!(p.round, Rounding::Stochastic | Rounding::Dither { .. });
        check.expect(site, gradient || !random, "stochastic rounding is for gradients")?;
        let nearest = kind != Kind::Head || !random;
        check.expect(site, nearest, "the gradients of the logits are rounded to nearest")?;
        if p.format.is_block() {
            if let Err(e) = p.codec() {
                check.fail::<()>(site, e)?;
            }
        } else if p.dtype() != Some(recipe.activations) {
            let why =
                format!("is {}, while activations between products are {}", p.format, recipe.activations);
            check.fail::<()>(site, why)?;
        }
    }
    axes(&check, s)?;
    for (a, b) in [(Site::FpropX, Site::FpropW), (Site::DgradDy, Site::DgradW), (Site::WgradDy, Site::WgradX)]
    {
        let (pa, pb) = (s.at(a), s.at(b));
        let pair = pa.format.is_block() == pb.format.is_block()
            && (pa.format.is_block() || pa.format == pb.format)
            && pa.format.spec().block == pb.format.spec().block;
        let why = format!(
            "is {}, but {} is {}: both operands must be plain and equal, or have the same block",
            pa.format,
            b.key(),
            pb.format
        );
        check.expect(a, pair, &why)?;
    }
    check.expect(
        Site::DgradW,
        s.at(Site::DgradW).same_bits(s.at(Site::FpropW)),
        "must equal fprop.w: one quantized weight, in two orders, serves both products",
    )?;
    origins(&check, s)
}

fn axes(check: &Check<'_>, s: &Section) -> Result<()> {
    for (site, axis) in [
        (Site::FpropX, BlockAxis::Row),
        (Site::FpropW, BlockAxis::Tile),
        (Site::DgradDy, BlockAxis::Row),
        (Site::DgradW, BlockAxis::Tile),
        (Site::WgradDy, BlockAxis::Col),
        (Site::WgradX, BlockAxis::Col),
        (Site::SavedH, BlockAxis::Row),
        (Site::DispatchFwd, BlockAxis::Row),
        (Site::DispatchBwd, BlockAxis::Row),
    ] {
        let p = s.at(site);
        let ok = !p.format.is_block() || p.axis == axis;
        check.expect(site, ok, &format!("must have axis {axis:?}: its blocks run along the contraction"))?;
        let multiplied = matches!(site.product(), "fprop" | "dgrad" | "wgrad");
        check.expect(
            site,
            !multiplied || !matches!(p.format, Format::Mxfp4),
            "mxfp4 is stored and sent, not multiplied: lift it to e4m3",
        )?;
    }
    for site in [Site::CombineFwd, Site::CombineBwd] {
        check.expect(
            site,
            !s.at(site).format.is_block(),
            "expert outputs and input gradients travel plain",
        )?;
    }
    Ok(())
}

/// What is made from something already quantized must be reachable by one conversion; where rows arrive quantized,
/// nothing can be made from their source.
fn origins(check: &Check<'_>, s: &Section) -> Result<()> {
    for (wire, sites) in [
        (Site::DispatchFwd, [Site::FpropX, Site::SavedX]),
        (Site::DispatchBwd, [Site::DgradDy, Site::WgradDy]),
    ] {
        if check.kind == Kind::Expert && s.at(wire).format.is_block() {
            for site in sites {
                let why = format!(
                    "experts have only what arrived, {} by {}: write from = \"dispatched\"",
                    s.at(wire),
                    wire.key()
                );
                check.expect(site, s.at(site).from == From::Dispatched, &why)?;
            }
        }
    }
    for site in check.kind.sites() {
        let p = s.at(site);
        let (origin_site, allowed) = match (site, p.from) {
            (_, From::Source) => continue,
            (Site::WgradX, From::Saved) => (Site::SavedX, check.kind != Kind::Head),
            (Site::FpropX | Site::SavedX, From::Dispatched) => {
                (Site::DispatchFwd, check.kind == Kind::Expert)
            }
            (Site::DgradDy | Site::WgradDy, From::Dispatched) => {
                (Site::DispatchBwd, check.kind == Kind::Expert)
            }
            _ => (site, false),
        };
        if !allowed {
            check.fail::<()>(site, format!("cannot be made from {:?} here", p.from))?;
        }
        let origin = s.at(origin_site);
        let converted = origin.format.is_block() && !p.same_bits(origin);
        check.expect(
            site,
            !converted || p.round != Rounding::NearestAway,
            "conversions between block formats round to nearest even",
        )?;
        // Codes of E4M3 are moved from one power of two to another; MXFP4's scales are made anew.
        let powers = origin.scale != ScaleRule::Amax && p.scale != ScaleRule::Amax;
        let known = CONVERSIONS.contains(&(origin.format, p.format, p.axis)) && origin.axis == BlockAxis::Row;
        let convertible = !converted || known && (powers || p.format != Format::E4m3);
        let why = format!("{p} cannot be made from {} ({origin}) by one conversion", origin_site.key());
        check.expect(site, convertible, &why)?;
    }
    Ok(())
}
