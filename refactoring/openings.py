import ast,subprocess,sys,re,collections
OPEN=re.compile(r'^(Of|Those|The same|That of|What|Which|How)\b')
files=subprocess.check_output(['git','ls-files','jaxthd'],text=True).split()
c=collections.Counter(); undoc=collections.Counter(); rows=[]
for f in files:
    if not f.endswith('.py'): continue
    t=ast.parse(open(f).read())
    def visit(body,public,inclass=False):
        for i,n in enumerate(body):
            if isinstance(n,ast.Expr) and isinstance(n.value,ast.Constant) and isinstance(n.value.value,str):
                m=OPEN.match(n.value.value.strip())
                if m: c[m[1]]+=1; rows.append((f,n.lineno,n.value.value.strip().split('\n')[0][:110]))
            if isinstance(n,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)):
                pub=public and not n.name.startswith('_')
                if pub and not isinstance(n,ast.ClassDef) and not ast.get_docstring(n): undoc[f]+=1
                if isinstance(n,ast.ClassDef): visit(n.body,pub,True)
                else: visit([b for b in n.body[:1]],False)
    visit(t.body,True)
print(c,sum(c.values())); print(sum(undoc.values()),undoc.most_common(10))
if len(sys.argv)>1:
    for r in rows: print(*r)
